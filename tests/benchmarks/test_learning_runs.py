"""Which runs a table needs, in which order; what is in the file is not done again."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learns.here import Here
from benchmarks.learns.runs import RESULTS, Run, Setting, Table, Wanted, complete
from benchmarks.learns.summary import line, lines

RATES, SEEDS = (0.1, 0.2, 0.3), (0, 1)
LINES = [Wanted(Setting("t", 0, row, "mean", 1, 5), RATES, SEEDS) for row in ("a", "b")]
TEST_ACCURACY = {0: 0.7, 1: 0.8}


def found(accuracy: float = 0.5, **more: Any) -> dict[str, Any]:
    return dict.fromkeys(RESULTS, 1.0) | {"accuracy": accuracy, "status": "ok"} | more


class Work:
    """Stands in for a training: the middle rate is the best; notes what was asked for."""

    def __init__(self, fails: int | None = None, error: BaseException | None = None) -> None:
        self.asked: list[Run] = []
        self.fails, self.error = fails, error

    def __call__(self, run: Run) -> dict[str, Any]:
        self.asked.append(run)
        if len(self.asked) - 1 == self.fails and self.error is not None:
            raise self.error
        if run.part == "test":
            return found(TEST_ACCURACY[run.seed])
        return found(0.9 if run.rate == 0.2 else 0.6)


def do(work: Work, path: Path, workers: int = 1) -> dict[Run, BaseException]:
    executor = Here() if workers == 1 else ThreadPoolExecutor(workers)
    with executor:
        return complete(LINES, Table(path), work, executor, workers, lambda *_: None)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_rate_is_chosen_and_then_shown_for_every_seed(tmp_path: Path, workers: int) -> None:
    work = Work()
    assert do(work, tmp_path / "a.csv", workers) == {}
    assert len(work.asked) == len(set(work.asked)) == len(LINES) * (len(RATES) + len(SEEDS))
    for wanted in LINES:
        mine = [run for run in work.asked if run.row == wanted.setting.row]
        assert {(run.part, run.seed) for run in mine[:3]} == {("validation", 0)}
        assert {(run.part, run.rate) for run in mine[3:]} == {("test", 0.2)}
        assert {run.seed for run in mine[3:]} == set(SEEDS)


@pytest.mark.parametrize("stop", range(10))
def test_an_interrupted_command_goes_on(tmp_path: Path, stop: int) -> None:
    path, first, second = tmp_path / "a.csv", Work(stop, KeyboardInterrupt()), Work()
    with pytest.raises(KeyboardInterrupt):
        do(first, path)
    do(second, path)
    do(whole := Work(), tmp_path / "b.csv")
    assert first.asked[:stop] + second.asked == whole.asked
    assert path.read_text() == (tmp_path / "b.csv").read_text()
    assert do(third := Work(), path) == {} and third.asked == []


def test_a_run_that_fails_is_told_and_tried_again(tmp_path: Path) -> None:
    path, error = tmp_path / "a.csv", RuntimeError("broken")
    failed = do(first := Work(1, error), path)
    assert failed == {first.asked[1]: error}
    assert len(first.asked) == 3 + 5  # the line whose rate could not be chosen shows nothing
    assert do(second := Work(), path) == {}
    assert second.asked[0] == first.asked[1] and len(second.asked) == 1 + 2


def test_a_line_that_was_cut_off_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    do(Work(), path)
    text = path.read_text()
    path.write_text(text[:-20])
    do(again := Work(), path)
    assert len(again.asked) == 1
    assert len(Table(path).done) == 10
    assert do(nothing := Work(), path) == {} and nothing.asked == []


def test_a_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("task,accuracy\ndigits,0.5\n")
    with pytest.raises(ValueError, match="has the columns"):
        Table(path)
    with pytest.raises(ValueError, match=r"got \['speed'\]"):
        Table(tmp_path / "b.csv").add(LINES[0].run("test", 0.1, 0), {"speed": 1.0})


def chosen(results: list[dict[str, Any]]) -> float | None:
    return LINES[0].chosen(dict(zip(LINES[0].trials, results, strict=False)))


def test_the_choice_of_a_rate() -> None:
    assert chosen([found(0.5), found(0.6), found(0.7)]) == 0.3
    assert chosen([found(0.5), found(0.6)]) is None  # one is not done
    assert chosen([found(0.7, loss=2.0), found(0.7, loss=1.0), found(0.6, loss=0.1)]) == 0.2
    broken = found(math.nan, status="not finite")
    assert chosen([found(0.1), broken, broken]) == 0.1
    single = Wanted(LINES[0].setting, (0.4,), SEEDS)
    assert single.trials == [] and single.chosen({}) == 0.4


def test_the_line_of_the_table() -> None:
    wanted = LINES[0]
    done = dict(zip(wanted.trials, [found(0.9), found(0.6), found(0.6)], strict=True))
    assert lines(LINES, done) == []
    shown = wanted.shown(0.1)
    done[shown[0]] = found(0.5, converged=0.9999, converged_worst=0.99, cpu_seconds=10.0)
    assert (line(wanted, done) or {})["seeds"] == 1
    done[shown[1]] = found(0.7, converged=0.9997, converged_worst=0.98, seconds=50.0)
    row = line(wanted, done) or {}
    assert (row["rate"], row["seeds"], row["test %"]) == ("0.1!", 2, "60.0")
    assert (row["min to max"], row["training s"]) == ("50.0 to 70.0", "5.5 (busy)")
    assert row["converged % (worst epoch)"] == "99.98 (98.00)"
    none = {"converged": math.nan, "converged_worst": math.nan}
    for first, second in (shown, reversed(shown)):  # a seed in which nothing was solved
        one = done | {first: done[shown[0]] | none, second: done[shown[0]]}
        assert (line(wanted, one) or {})["converged % (worst epoch)"] == "99.99 (99.00)"
    both = done | dict.fromkeys(shown, done[shown[0]] | none)
    assert (line(wanted, both) or {})["converged % (worst epoch)"] == ""
    done[shown[1]] = dict.fromkeys(RESULTS, math.nan) | {"status": "not finite", "parameters": 3}
    row = line(wanted, done) or {}
    assert (row["seeds"], row["test %"]) == ("1 of 2", "50.0")

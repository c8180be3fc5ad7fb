"""``benchmarks/learning.py`` on few images: what a run gives, and the command from end to end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn", reason="the digits are scikit-learn's")

from benchmarks import learning
from benchmarks.learns import training
from benchmarks.learns.runs import RESULTS, Run, Table
from benchmarks.learns.task import Task
from benchmarks.learns.training import perform
from solvers import Tolerance

RUN = Run("digits", 128, "per-token", "mean", 1, 2, "test", 3e-3, 0)


@pytest.fixture(autouse=True)
def hardly_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "TIMED_SECONDS", 0.0)


def reading(change: Callable[[Task], Task]) -> Callable[[str, int | None], Task]:
    return lambda name, limit: change(learning.task_of(name, limit))


def steady(found: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the clock."""
    return {n: v for n, v in found.items() if not n.endswith(("seconds", "_ms"))}


def test_a_run_depends_on_its_settings_only() -> None:
    first = perform(RUN)
    torch.manual_seed(99)
    assert steady(perform(RUN)) == steady(first)
    assert steady(perform(dataclasses.replace(RUN, seed=1))) != steady(first)
    assert set(first) <= set(RESULTS) and first["status"] == "ok"
    assert first["parameters"] == 33_216 and "converged" not in first
    assert 0 <= first["accuracy"] <= 1 and first["step_ms"] > 0


def test_training_learns() -> None:
    assert perform(dataclasses.replace(RUN, epochs=40, rate=1e-2))["train_accuracy"] > 0.8


def test_the_rate_is_not_chosen_by_test_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = dataclasses.replace(RUN, part="validation")
    before = {part.part: steady(perform(part)) for part in (trial, RUN)}

    def shuffled(task: Task) -> Task:
        return dataclasses.replace(
            task, test_labels=task.test_labels.roll(1), test_inputs=task.test_inputs.flip(1)
        )

    monkeypatch.setattr(training, "task_of", reading(shuffled))
    assert steady(perform(trial)) == before["validation"]
    assert steady(perform(RUN))["loss"] != before["test"]["loss"]


def test_the_validation_part_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = dataclasses.replace(RUN, part="validation")
    before = perform(trial)

    def spoiled(task: Task) -> Task:
        inputs = task.inputs.clone()
        inputs[-task.validation :] = 0.0
        return dataclasses.replace(task, inputs=inputs)

    monkeypatch.setattr(training, "task_of", reading(spoiled))
    after = perform(trial)
    assert after["train_accuracy"] == before["train_accuracy"] and after["loss"] != before["loss"]
    assert steady(perform(RUN))["train_accuracy"] <= 1  # there, all are trained on


def test_an_equilibrium_tells_how_it_converged() -> None:
    found = perform(dataclasses.replace(RUN, row="equilibrium", limit=64, epochs=1))
    assert found["converged"] == found["adjoint_converged"] == 1.0
    assert found["converged_worst"] == found["adjoint_converged_worst"] == 1.0
    assert 1 < found["evaluations"] <= 60 and found["adjoint_products"] >= 1


@pytest.mark.filterwarnings("ignore::solvers.SolveWarning")
def test_the_worst_epoch_is_kept() -> None:
    """Two epochs of which one asks for more than float32 can give."""
    run = dataclasses.replace(RUN, row="equilibrium", limit=64)
    task = learning.task_of("digits", 64)
    made = training.Training(run, task, (task.inputs, task.labels, task.inputs, task.labels))
    assert made.epoch(0)
    made.counts.layers[0].tolerance = Tolerance(1e-14)
    assert made.epoch(1)
    told = made.convergence()
    assert (told["converged"], told["converged_worst"]) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("row", "blank"),
    [
        ("block, first step", ("converged", "adjoint_converged", "evaluations")),
        ("block, one-step gradient", ("adjoint_converged", "adjoint_products")),
    ],
)
def test_nothing_is_told_of_solves_that_were_none(
    tmp_path: Path, row: str, blank: tuple[str, ...]
) -> None:
    run = dataclasses.replace(RUN, row=row, limit=64, epochs=1)
    kept = Table(tmp_path / "learning.csv")
    kept.add(run, perform(run))
    for found in (kept.done[run], Table(tmp_path / "learning.csv").done[run]):
        worst = [f"{name}_worst" for name in blank if name.endswith("converged")]
        assert all(math.isnan(found[name]) for name in (*blank, *worst))
    assert math.isnan(found["converged_worst"]) == ("converged" in blank)


def test_weights_that_grow_beyond_all_bounds_are_told() -> None:
    found = perform(dataclasses.replace(RUN, rate=1e30))
    assert found["status"] == "not finite" and "accuracy" not in found


def test_logistic_regression() -> None:
    found = perform(Run("digits", 300, "logistic", "pixels", 0, 0, "test", 1.0, 0))
    assert 0.85 < found["accuracy"] < 0.97 and found["parameters"] == 650
    assert math.isclose(found["loss"], 0.35, abs_tol=0.2)


ARGUMENTS = [
    "--tasks",
    "digits",
    "--readouts",
    "mean",
    "--rows",
    "logistic",
    "identity",
    "per-token",
]
ARGUMENTS += ["--limit", "100", "--epochs", "1", "--seeds", "2", "--rates", "1e-3", "3e-3"]


def command(tmp_path: Path, *more: str) -> None:
    threads = torch.get_num_threads()
    try:
        learning.main([*ARGUMENTS, "--out", str(tmp_path), *more])
    finally:
        torch.set_num_threads(threads)


def test_rows_beside_ablations_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        command(tmp_path / "new", "--ablations")
    assert stop.value.code == 2 and not (tmp_path / "new").exists()
    assert "--ablations takes the place of --rows" in capsys.readouterr().err
    reader = learning.parser()
    rows = {
        name: learning._rows(reader.parse_args(o))
        for name, o in (("a", ["--ablations"]), ("b", []))
    }
    assert rows["b"] == list(learning.MAIN_ROWS) and not {*rows["a"]} & {*rows["b"]}


def test_the_command_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Run] = []

    def until_the_third(run: Run) -> dict[str, Any]:
        asked.append(run)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return perform(run)

    monkeypatch.setattr(learning, "perform", until_the_third)
    with pytest.raises(SystemExit) as stop:
        command(tmp_path)
    assert stop.value.code == 130
    assert len(Table(tmp_path / "learning.csv").done) == 2
    command(tmp_path)
    assert len(asked) == len(set(asked)) + 1  # only the one that was cut off began twice
    # Three penalties and one run; for each of two rows two rates and two seeds.
    assert len(set(asked)) == 3 + 1 + 2 * (2 + 2)
    said = capsys.readouterr().out
    assert [row.split(" | ")[3] for row in said.splitlines()[2:]] == [
        "logistic",
        "identity",
        "per-token",
    ]
    done = len(asked)
    command(tmp_path)
    command(tmp_path, "--table")
    assert len(asked) == done
    again = capsys.readouterr().out
    assert again == 2 * said


def test_a_table_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(tmp_path, "--table")
    assert capsys.readouterr().out == "no run of this table is done\n"


def test_tasks_without_data_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    learning.task_of.cache_clear()
    command(tmp_path, "--table", "--tasks", "cifar10", "digits")
    assert "cifar10 left out: no copy of CIFAR-10" in capsys.readouterr().err


def test_settings_that_are_one_model_are_trained_once() -> None:
    options = learning.parser().parse_args(
        [
            "--tasks",
            "digits",
            "recall",
            "--layers",
            "1",
            "3",
            "--rows",
            "logistic",
            "identity",
            "encoder",
        ]
    )
    lines = learning.plan(options, learning.tasks_here(options))
    shown = [(w.setting.task, w.setting.row, w.setting.readout, w.setting.layers) for w in lines]
    assert shown == [
        ("digits", "logistic", "pixels", 0),
        ("digits", "identity", "mean", 0),
        ("digits", "encoder", "mean", 1),
        ("digits", "encoder", "mean", 3),
        ("digits", "identity", "class", 0),
        ("digits", "encoder", "class", 1),
        ("digits", "encoder", "class", 3),
        ("recall", "identity", "query", 0),
        ("recall", "encoder", "query", 1),
        ("recall", "encoder", "query", 3),
    ]
    assert lines[0].seeds == (0,) and lines[1].seeds == (0, 1, 2)
    assert lines[0].rates != lines[2].rates

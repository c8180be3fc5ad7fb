"""The race against JAX: two processes that work in turns, one yardstick; JAX itself where it is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import vs_jax
from benchmarks.jax_peers import ours
from benchmarks.jax_peers.protocol import Worker, WorkerError
from benchmarks.layers import MeanField

TOLERANCES = {"forward": 1e-2, "backward": 1e-3}


def start(name: str, *log: str, **options: Any) -> Worker:
    return Worker([sys.executable, "-m", "tests.workers.contestants", name, *log], **options)


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("problem") / "problem.npz"
    np.savez(file, allow_pickle=False, x=np.arange(3.0))
    return file


@pytest.fixture(scope="module")
def worker(problem: Path) -> Iterator[Worker]:
    with start("fake", threads=1) as found:
        found.ask("load", file=str(problem))
        yield found


def test_a_worker_says_what_it_offers_and_keeps_to_its_threads(worker: Worker) -> None:
    assert worker.contestants[0] == "fake good"
    assert worker.versions == {"OMP_NUM_THREADS": "1", "NPROC": "1"}
    if hasattr(os, "sched_getaffinity"):
        assert len(os.sched_getaffinity(worker.process_id)) == 1


@pytest.mark.parametrize("kind", ["good", "prints"])
def test_a_step_comes_back_whatever_the_libraries_print(
    worker: Worker, kind: str, tmp_path: Path
) -> None:
    file = tmp_path / "answer.npz"
    worker.ask("step", contestant=f"fake {kind}", file=str(file), **TOLERANCES)
    with np.load(file) as found:
        assert found["z"].tolist() == [0.01, 1.01, 2.01]
        assert found["weight"] == 1e-3
    assert worker.ask("count", contestant=f"fake {kind}", **TOLERANCES) == [3, 4]
    seconds = worker.ask("time", contestant=f"fake {kind}", steps=3, before=2, **TOLERANCES)
    assert len(seconds) == 3 and min(seconds) > 0


def test_a_contestant_that_fails_is_named_and_the_worker_goes_on(worker: Worker) -> None:
    with pytest.raises(WorkerError, match=r"fake: ArithmeticError: no pivot"):
        worker.ask("time", contestant="fake raises", steps=1, before=0, **TOLERANCES)
    assert worker.ask("count", contestant="fake good", **TOLERANCES) == [3, 4]


@pytest.mark.parametrize(
    ("kind", "limit", "message"),
    [
        ("dies", 60.0, r"ended without an answer \(exit code 7\); it wrote: the last words"),
        ("hangs", 0.1, r"did not answer within 0.1 seconds \(exit code -9\)"),
    ],
)
def test_every_wait_has_an_end(problem: Path, kind: str, limit: float, message: str) -> None:
    with start("fake") as worker:
        worker.ask("load", file=str(problem))
        worker.limit = limit
        with pytest.raises(WorkerError, match=message):
            worker.ask("time", contestant=f"fake {kind}", steps=1, before=0, **TOLERANCES)
        with pytest.raises(WorkerError, match=message):  # it is gone, and that is said at once
            worker.ask("count", contestant="fake good", **TOLERANCES)


def test_a_program_that_does_not_start_is_told() -> None:
    with pytest.raises(WorkerError, match=r"exit code 1.*no_such_program"):
        Worker([sys.executable, "-m", "tests.workers.no_such_program"])


def test_workers_take_turns(problem: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start("one", str(log)) as one, start("two", str(log)) as two:
        entries = []
        for worker, name in ((one, "one good"), (two, "two good")):
            worker.ask("load", file=str(problem))
            entries.append(vs_jax.Entry(name, worker, (1e-2, 1e-3), (0.0, 0.0), True))
        vs_jax.race(entries, rounds=4, pause=0.0)
    steps = 4 * (vs_jax.STEPS + vs_jax.BEFORE)
    words = [line.split() for line in log.read_text().splitlines()]
    assert len(words) == 2 * 2 * steps
    for begin, end in zip(words[::2], words[1::2], strict=True):
        assert begin == [end[0], "begins"] and end[1] == "ends"
    assert {name for name, _ in words} == {"one", "two"}
    assert 1 < sum(a[0] != b[0] for a, b in pairwise(words)) < 8  # whole turns, in both orders
    assert all(len(each.seconds) == 4 * vs_jax.STEPS for each in entries)


class Measured:
    """A problem whose residual is ten times the forward tolerance, and the error of the gradient
    twenty times the backward one."""

    def errors(self, worker: Worker, name: str, tolerances: tuple[float, float]) -> Any:
        return 10 * tolerances[0], 20 * tolerances[1]


def test_the_loosest_tolerances_that_meet_the_target_are_found(worker: Worker) -> None:
    measured: Any = Measured()
    ladder = [1e-2, 1e-3, 1e-4, 1e-5]
    found = vs_jax.loosest(measured, worker, "fake good", (1e-2, 1e-2), ladder)
    assert found.tolerances == (1e-3, 1e-4)
    assert found.reached == pytest.approx((1e-2, 2e-3))
    assert found.meets and found.calls == (3, 4)
    assert not vs_jax.loosest(measured, worker, "fake good", (1e-6, 1e-2), ladder).meets


def test_ratios_are_to_what_met_the_target(worker: Worker) -> None:
    times = {"ours": 6.0, "hand-jitted": 2.0, "jaxopt fast": 1.0, "jaxopt slow": 3.0}
    entries = [
        vs_jax.Entry(name, worker, (1e-2, 1e-3), (0.0, 0.0), name != "jaxopt fast", (3, 4), [t] * 4)
        for name, t in times.items()
    ]
    found = {row["contestant"]: row for row in vs_jax.rows(entries)}
    assert found["ours"]["/ hand-jitted"] == 3.0
    assert found["ours"]["/ best jaxopt"] == 2.0
    assert found["jaxopt fast (target missed)"]["ms"] == 1000.0


def test_a_missing_environment_names_what_makes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["vs_jax.py", "--jax-python", str(tmp_path / "python")])
    with pytest.raises(SystemExit) as end:
        vs_jax.main()
    assert end.value.code == 2
    assert "make bench-jax" in capsys.readouterr().err


def test_what_is_compared_with_is_pinned_and_in_the_extra() -> None:
    """The extra "bench" allows what the table was measured with."""
    root = Path(vs_jax.ROOT)
    pinned = (root / "benchmarks/jax_peers/requirements.txt").read_text().splitlines()[1:]
    extra = (root / "setup.cfg").read_text().split("\nbench =\n")[1].split("\n\n")[0].splitlines()
    names = [line.split("==")[0] for line in pinned]
    assert names == [line.strip().split(">=")[0] for line in extra]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[vs_jax.Problem, dict[str, Any]]:
    """A layer in a file, and the step of ours to the tightest tolerances."""
    problem = vs_jax.Problem(MeanField(), None, tmp_path_factory.mktemp("layer"))
    with np.load(problem.file) as arrays:
        step = ours.load(dict(arrays))["ours"]
    return problem, step.read(step.run(1e-7, 1e-7))


def test_our_contestants_make_the_same_step(
    exact: tuple[vs_jax.Problem, dict[str, Any]],
) -> None:
    problem, wanted = exact
    layer = problem.layer
    with torch.no_grad():
        z = torch.from_numpy(wanted["z"])
        torch.testing.assert_close(layer.update(z, layer.x, layer.couplings()), z)
    with np.load(problem.file) as arrays:
        contestants = ours.load(dict(arrays))
    del contestants[
        "ours, DEQ layer compiled"
    ]  # minutes of compilation; DEQ.compile has its own tests
    for step in contestants.values():
        same(step.read(step.run(1e-7, 1e-7)), wanted)
        assert min(step.count(1e-4, 1e-3)) > 3


def test_every_contestant_in_jax_makes_the_same_step(
    exact: tuple[vs_jax.Problem, dict[str, Any]], tmp_path: Path
) -> None:
    try:
        python = vs_jax.jax_python(None)
    except OSError as error:
        pytest.skip(str(error))
    (problem, wanted), most = exact, {"forward": 1e-6, "backward": 1e-6}
    command = [str(python), "-m", vs_jax.PROGRAMS[1]]
    with Worker(command, environment=vs_jax.JAX_ENVIRONMENT) as worker:
        worker.ask("load", file=str(problem.file))
        assert vs_jax.BAR in worker.contestants
        for name in worker.contestants:
            file = tmp_path / f"{name}.npz"
            worker.ask("step", contestant=name, file=str(file), **most)
            with np.load(file) as found:
                same(dict(found), wanted)
        assert min(worker.ask("count", contestant=vs_jax.BAR, **most)) > 3


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        error = np.linalg.norm(found[key].astype(float) - value) / np.linalg.norm(value)
        assert error < 1e-4, key

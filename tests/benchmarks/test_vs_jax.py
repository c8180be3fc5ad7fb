"""The race against JAX: two processes that work in turns, one yardstick; JAX itself where it is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import vs_jax
from benchmarks.jax_peers.protocol import Worker, WorkerError
from benchmarks.step import MeanField

TOLERANCES = 1e-2, 1e-3
TIGHT = 1e-6, 1e-6  # float32 reaches 1e-7 on some processors only
PROBLEM = {"x": np.arange(3.0)}


def start(name: str) -> Worker:
    return Worker([sys.executable, "-m", "tests.workers.contestants", name], threads=1)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with start("fake") as found:
        found.ask("load", PROBLEM)
        yield found


def test_a_step_comes_back(worker: Worker) -> None:
    assert worker.contestants[0] == "fake good"
    assert worker.versions == {"OMP_NUM_THREADS": "1", "NPROC": "1"}
    if hasattr(os, "sched_getaffinity"):
        assert len(os.sched_getaffinity(worker.process_id)) == 1
    found = worker.ask("step", "fake good", *TOLERANCES)
    assert found["z"].tolist() == [0.01, 1.01, 2.01] and found["weight"] == 1e-3
    seconds = worker.ask("time", "fake good", *TOLERANCES, 3, 2)
    assert len(seconds) == 3 and min(seconds) > 0


def test_a_contestant_that_fails_is_named(worker: Worker) -> None:
    """The worker goes on; one that dies, or never starts, is told."""
    with pytest.raises(WorkerError, match=r"fake: ArithmeticError: no pivot"):
        worker.ask("time", "fake raises", *TOLERANCES, 1, 0)
    assert worker.ask("step", "fake good", *TOLERANCES)["weight"] == 1e-3
    with start("fake") as other, pytest.raises(WorkerError, match="ended with 7"):
        other.ask("load", PROBLEM)
        other.ask("time", "fake dies", *TOLERANCES, 1, 0)
    with pytest.raises(WorkerError, match="ended with 1"):
        Worker([sys.executable, "-m", "tests.workers.no_such_program"])


@pytest.fixture(scope="module")
def exact() -> tuple[vs_jax.Problem, dict[str, Any]]:
    """A layer in a file, and the step of ours to a few roundings of float32."""
    problem = vs_jax.Problem(MeanField(), None)
    step = vs_jax.load(problem.arrays)["ours"]
    return problem, step.read(step.run(*TIGHT))


def test_our_step_is_a_fixed_point(exact: tuple[vs_jax.Problem, dict[str, Any]]) -> None:
    problem, wanted = exact
    layer = problem.layer
    with torch.no_grad():
        z = torch.from_numpy(wanted["z"])
        torch.testing.assert_close(
            layer.update(z, layer.x, layer.couplings()), z, rtol=1e-5, atol=1e-5
        )


def test_every_contestant_in_jax_makes_the_same_step(
    exact: tuple[vs_jax.Problem, dict[str, Any]],
) -> None:
    try:
        python = vs_jax.python_with_jax(None)
    except SystemExit as error:
        pytest.skip(str(error))
    problem, wanted = exact
    command = [str(python), "-m", vs_jax.PROGRAMS[1]]
    with Worker(command, environment=vs_jax.JAX_ENVIRONMENT) as worker:
        worker.ask("load", problem.arrays)
        assert vs_jax.BAR in worker.contestants
        for name in worker.contestants:
            same(worker.ask("step", name, *TIGHT), wanted)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        error = np.linalg.norm(found[key].astype(float) - value) / np.linalg.norm(value)
        assert error < 1e-4, key

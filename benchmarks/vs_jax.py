"""Our training step against JAX: jaxopt, and loops jitted by hand.

python benchmarks/vs_jax.py [--rounds 30] [--couplings 1 2] [--jax-python .venv-jax/bin/python]

The layer, targets and yardstick are those of step.py. Ours run in one process, JAX's in another, with Pythons
of their own ("make bench-jax" makes that of JAX); they take turns, and one waits while the other works.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import solvers
from benchmarks.jax_peers.protocol import ROOT, Arrays, Contestant, Worker, serve
from benchmarks.measure import table
from benchmarks.step import TARGETS, TOLERANCES, MeanField, Ours, Pair, errors, loosest

PROGRAMS = "benchmarks.vs_jax", "benchmarks.jax_peers.theirs"
ANSWER = "--answer"  # as the last word but the pipe: this program answers for ours
VARIABLE = "IMPLICIT_ATTN_JAX_PYTHON"
BAR, LIBRARY = "hand-jitted", "jaxopt"  # what the ratios are to: this row, the best of these
STEPS, BEFORE = 4, 2  # timed steps of a turn, and those that go before
JAX_ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}


# --- ours, which answers from a process of its own ------------------------------------------------------


class Step:
    """A contestant as one that can be asked."""

    def __init__(self, layer: MeanField) -> None:
        self.layer, self.contestant = layer, Ours(layer, None)

    def run(self, forward: float, backward: float) -> Tensor:
        return self.contestant.step((forward, backward))

    def read(self, result: Tensor) -> Arrays:
        found = {"z": result.numpy()}
        for name, parameter in self.layer.named_parameters():
            assert parameter.grad is not None
            found[name] = parameter.grad.numpy()
        return found


def load(arrays: Arrays) -> dict[str, Contestant]:
    layer = MeanField()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.from_numpy(arrays[name]))
    layer.x, layer.cotangent = (torch.from_numpy(arrays[name]) for name in ("x", "cotangent"))
    return {"ours": Step(layer)}


def answer() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    warnings.simplefilter("ignore", solvers.SolveWarning)
    serve(["ours"], {"torch": torch.__version__}, load)


# --- the race -----------------------------------------------------------------------------------------


@dataclass
class Entry:
    """A contestant in the race for one target."""

    name: str
    worker: Worker
    tolerances: Pair
    reached: tuple[float, float]  # true residual, gradient error
    meets: bool
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Problem:
    """A mean-field layer as arrays, its exact solution, and the errors of what a worker found."""

    def __init__(self, layer: MeanField, exact: Any) -> None:
        self.layer, self.exact = layer, exact
        self.arrays = {name: each.detach().numpy() for name, each in layer.named_parameters()}
        others = {"x": layer.x, "cotangent": layer.cotangent, "blocks": layer.blocks}
        self.arrays |= {name: each.numpy() for name, each in others.items()}

    def errors(self, worker: Worker, name: str, tolerances: Pair) -> tuple[float, float]:
        """Worst true residual of a sample, and the error of the gradient: the same measure for all."""
        found: Arrays = worker.ask("step", name, *tolerances)
        for key, parameter in self.layer.named_parameters():
            parameter.grad = torch.from_numpy(found[key])
        return errors(self.layer, torch.from_numpy(found["z"]), self.exact)


def enter(problem: Problem, worker: Worker, name: str, target: Pair) -> Entry:
    """A contestant with the loosest tolerances that reach the target."""
    reach = partial(problem.errors, worker, name)
    chosen, reached = loosest(reach, target, TOLERANCES, TOLERANCES)
    meets = all(got <= wanted for got, wanted in zip(reached, target, strict=True))
    return Entry(name, worker, chosen, reached, meets)


def race(entries: Sequence[Entry], rounds: int, pause: float) -> None:
    """Time all in turns, in an order that changes.

    In the pause, the threads of a library stop looking for work.
    """
    turns, order = list(entries), random.Random(0)
    for _ in range(rounds):
        order.shuffle(turns)
        for each in turns:
            time.sleep(pause)
            each.seconds += each.worker.ask("time", each.name, *each.tolerances, STEPS, BEFORE)


def rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The table: medians, the middle 80 %, and ratios of medians."""
    bar = next((each.median for each in entries if each.name == BAR and each.meets), None)
    libraries = [e.median for e in entries if e.name.startswith(LIBRARY) and e.meets]
    found: list[dict[str, Any]] = []
    for each in entries:
        tenths = statistics.quantiles(each.seconds, n=10)
        row: dict[str, Any] = {"contestant": each.name + " (target missed)" * (not each.meets)}
        row["tolerances"] = "{:.1e}, {:.1e}".format(*each.tolerances)
        row |= {"residual": each.reached[0], "gradient error": each.reached[1]}
        row["ms"] = 1e3 * each.median
        row["10 to 90 %"] = f"{1e3 * tenths[0]:.3g}-{1e3 * tenths[-1]:.3g}"
        row[f"/ {BAR}"] = "" if bar is None else each.median / bar
        found.append(row | {f"/ best {LIBRARY}": each.median / min(libraries) if libraries else ""})
    return found


def compare(workers: Sequence[Worker], scale: float, rounds: int, pause: float) -> None:
    """The tables of one layer."""
    layer = MeanField(scale)
    problem = Problem(layer, layer.exact())
    for worker in workers:
        worker.ask("load", problem.arrays)
    for target in TARGETS:
        entries = [
            enter(problem, worker, name, target)
            for worker in workers
            for name in worker.contestants
        ]
        race(entries, rounds, pause)
        print(
            f"\nTraining step, mean-field layer, couplings x {scale:g}; "
            f"residual <= {target[0]:g}, gradient error <= {target[1]:g}\n"
        )
        print(table(rows(entries)), flush=True)


def python_with_jax(given: Path | None) -> Path:
    """The Python of the environment with JAX; SystemExit where there is none."""
    path = given or Path(os.environ.get(VARIABLE) or ROOT / ".venv-jax" / "bin" / "python")
    if not path.is_file():
        raise SystemExit(f"no Python with JAX at {path}; `make bench-jax` makes .venv-jax")
    return path


def main(
    rounds: int = 30,  # turns of 4 timed steps
    couplings: tuple[float, ...] = (1.0, 2.0),  # scales of the couplings
    threads: int = 2,  # of each process
    pause: float = 0.02,  # seconds between two contestants' turns
    jax_python: Path | None = None,  # default: $IMPLICIT_ATTN_JAX_PYTHON, else .venv-jax
) -> None:
    """Start both workers and print all tables."""
    python = python_with_jax(jax_python)
    torch.set_num_threads(threads)
    ours_command, theirs_command = (
        [str(each), "-m", program]
        for each, program in zip((sys.executable, python), PROGRAMS, strict=True)
    )
    with (
        Worker([*ours_command, ANSWER], threads=threads) as ours,
        Worker(theirs_command, threads=threads, environment=JAX_ENVIRONMENT) as theirs,
    ):
        versions = ours.versions | theirs.versions
        print(", ".join(f"{name} {each}" for name, each in versions.items()))
        print(f"{threads} threads each")
        for scale in couplings:
            compare((ours, theirs), scale, rounds, pause)


if __name__ == "__main__":
    if ANSWER in sys.argv:
        answer()
    else:
        tyro.cli(main)

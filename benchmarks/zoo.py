"""Evaluations on the problem zoo: ours against the best of torchdeq's solvers, problem by problem.

    python benchmarks/zoo.py

Two counts, both to the same true relative residual ``|f(z) - z| / |f(z)|``:

* *first hit*: evaluations until a sample first meets it, as if torchdeq could stop sample by sample;
* *billed*: evaluations that a sample is charged until the solver returns. Ours stop per sample; the
  best of torchdeq's stops when the worst sample of the batch is done, and bills them all.
"""

from __future__ import annotations

import math
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # the zoo lives there
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import solvers
from benchmarks.measure import table
from cases.torchdeq_oracle import best, count
from problems import zoo
from problems.zoo import ZooProblem

TOLERANCE, BUDGET = 1e-6, 500
OURS: dict[str, solvers.Solver | None] = {
    "default": None,
    "anderson(20)": solvers.Anderson(memory=20),
    "anderson(50)": solvers.Anderson(memory=50),
    "broyden": solvers.Broyden(),
    "newton": solvers.Newton(),
    "forward": solvers.Forward(),
}


class _Monitored(solvers.EnergyUpdate):
    """The recorded map with the problem's energy; its gradient is z - f(z)."""

    def __init__(self, f: Callable[..., Tensor], problem: ZooProblem) -> None:
        self.f, self.problem, self.symmetric = f, problem, problem.symmetric

    def joint(self, z: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        fz = self.f(z, *args)
        with torch.no_grad():
            energy = self.problem.energy(z, *args[:-1])  # type: ignore[misc]
        return fz, energy, z - fz

    def __call__(self, z: Any, *args: Any) -> Tensor:
        return self.f(z, *args)


def counts(problem: ZooProblem, solver: solvers.Solver | None) -> Tensor:
    """Evaluations per sample to the tolerance, infinite where it was not met."""
    # Without its energy an accelerated method is unguarded, as torchdeq's are.
    guarded = problem.energy is not None and (solver is None or solver == solvers.Newton())

    def run(f: Callable[..., Tensor], z0: Tensor, args: tuple[Any, ...]) -> solvers.Solution:
        options: Any = {"solver": solver, "tolerance": solvers.Tolerance(TOLERANCE)}
        options |= {"max_steps": BUDGET, "adjoint": None, "on_failure": "ignore"}
        return solvers.fixed_point(_Monitored(f, problem) if guarded else f, z0, args, **options)

    return count(problem, TOLERANCE, BUDGET, run).evaluations


def row(name: str) -> dict[str, Any]:
    """One problem: torchdeq's best, our default, our best."""
    problem = zoo.make(name)
    theirs, their_counts = best(problem, TOLERANCE, BUDGET)
    ours = {label: counts(problem, solver) for label, solver in OURS.items()}
    medians = {label: values.median().item() for label, values in ours.items()}
    winner = min(medians, key=lambda label: medians[label])
    default, middle = ours["default"], their_counts.median().item()
    return {
        "problem": name,
        "torchdeq's best": f"{theirs} {middle:g}",
        "our default": f"{medians['default']:g}",
        "our best": f"{winner} {medians[winner]:g}",
        "default / theirs": _ratio(medians["default"], middle),
        "best / theirs": _ratio(medians[winner], middle),
        "billed, default / theirs": _ratio(default.mean().item(), their_counts.max().item()),
    }


def _ratio(ours: float, theirs: float) -> float:
    if math.isinf(theirs):
        return math.nan if math.isinf(ours) else 0.0
    return ours / theirs


def summary(rows: list[dict[str, Any]]) -> str:
    """Medians of the ratios, and where our best solver needs more than theirs."""
    lines = []
    for key in ("default / theirs", "best / theirs", "billed, default / theirs"):
        ratios = [r[key] for r in rows if not math.isnan(r[key])]
        lines.append(
            f"median of {key}: {statistics.median(ratios):.2f} over {len(ratios)} problems"
        )
    lost = [f"{r['problem']} ({r['best / theirs']:.2f})" for r in rows if r["best / theirs"] > 1]
    lines.append(f"problems where our best needs more: {', '.join(lost) or 'none'}")
    return "\n".join(lines)


def show() -> None:
    """Print the comparison and its summary."""
    rows = [row(name) for name in zoo.SOLVABLE]
    print(f"\nzoo: evaluations to a true relative residual of {TOLERANCE:g}, median over samples\n")
    print(table(rows))
    print(f"\n{summary(rows)}")


if __name__ == "__main__":
    torch.set_num_threads(2)
    warnings.simplefilter("ignore", solvers.SolveWarning)
    show()

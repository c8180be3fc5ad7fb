"""Other people's problems: ours, torchdeq's and scipy's solvers on 70 of them, in one run.

    python benchmarks/other_problems.py

17 maps ``z = f(z)``, 20 systems ``F = 0`` posed as ``z = z - F(z)``, 33 minimisers posed as
``z = z - gradient`` (``tests/problems/collected.py``), each from its published start, in float64.

One criterion for every method: a problem is solved where ``|f(z) - z| <= 1e-6 max(1, |z|)``, recomputed
by us, after at most 500 evaluations. An evaluation is one call of f, or of an energy with its
gradient; those of scipy's finite differences count. A peer's own test of convergence is off: it is
stopped at its first evaluation of a point that meets the criterion. Ours stop themselves
(``Tolerance(1e-6, 1e-6)``) and are charged until they return, Jacobian products included. Where an
energy is flat far away (jennrich_sampson, gulf) a point there meets the criterion, for every method.

A ratio is the evaluations of a method over those of our default, median over the problems both solve.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from scipy.optimize import minimize, root
from torch import Tensor
from torchdeq.solver import get_solver

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the problems live with the tests

import solvers
from benchmarks.measure import table
from problems.collected import (
    BUDGET,
    MAPS,
    MINIMISERS,
    ROUNDING,
    SYSTEMS,
    TOLERANCE,
    Collected,
    run,
    solved,
)

Method = Callable[[Collected], float]
KINDS = {"maps": MAPS, "systems": SYSTEMS, "minimisers": MINIMISERS}
OURS: dict[str, solvers.Solver | None] = {
    "ours, default": None,
    "ours, Anderson": solvers.Anderson(),
    "ours, Broyden": solvers.Broyden(),
    "ours, LBFGS": solvers.LBFGS(),
}


class Enough(Exception):
    """Ends a peer from inside f: the criterion is met, or the budget is spent."""


class Counter:
    """The problem's f, counted; raises :class:`Enough` at the first point that meets the criterion.

    Attributes:
        calls: evaluations so far.
        reached: the evaluation that met the criterion, infinite if none did.
    """

    def __init__(self, problem: Collected) -> None:
        self.problem, self.calls, self.reached = problem, 0, math.inf

    def __call__(self, z: Tensor) -> Tensor:
        """``f(z)``, (1, n) -> (1, n)."""
        if self.calls >= BUDGET:
            raise Enough
        self.calls += 1
        z = z.detach()
        with torch.no_grad():
            fz = self.problem.f(z)
        if float((fz - z).norm()) <= TOLERANCE * (1 + ROUNDING) * max(1.0, float(z.norm())):
            self.reached = self.calls
            raise Enough
        return fz

    def minus(self, x: np.ndarray) -> np.ndarray:
        """``z - f(z)``, (n,) -> (n,): what a root finder is given."""
        z = torch.from_numpy(np.array(x, dtype=float)).reshape(1, -1)
        return (z - self(z)).numpy()[0]

    def energy(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """Energy and gradient, one evaluation."""
        gradient = self.minus(x)
        z = torch.from_numpy(np.array(x, dtype=float)).reshape(1, -1)
        return float(self.problem.function(z)), gradient


def peer(solve: Callable[[Counter, Collected], Any]) -> Method:
    """Evaluations that a peer's ``solve(counter, problem)`` needs, infinite where it fails."""

    def evaluations(problem: Collected) -> float:
        counter = Counter(problem)
        with contextlib.suppress(Exception):  # a peer's own failure counts as not solved
            solve(counter, problem)
        return counter.reached

    return evaluations


def torchdeq(name: str) -> Method:
    def solve(counter: Counter, problem: Collected) -> Any:
        return get_solver(name)(counter, problem.z0, max_iter=BUDGET, tol=0.0, stop_mode="rel")

    return peer(solve)


def scipy_root(method: str, **options: Any) -> Method:
    def solve(counter: Counter, problem: Collected) -> Any:
        return root(counter.minus, problem.z0[0].numpy(), method=method, options=options)

    return peer(solve)


def scipy_minimise(method: str, **options: Any) -> Method:
    def solve(counter: Counter, problem: Collected) -> Any:
        start = problem.z0[0].numpy()
        return minimize(counter.energy, start, jac=True, method=method, options=options)

    return peer(solve)


PEERS: dict[str, Method] = {
    "torchdeq broyden": torchdeq("broyden"),
    "torchdeq anderson": torchdeq("anderson"),
    "scipy hybr": scipy_root("hybr", xtol=1e-15, maxfev=10 * BUDGET),
    "scipy krylov": scipy_root("krylov", fatol=1e-300, maxiter=BUDGET),
}
MINIMISING: dict[str, Method] = {
    "scipy L-BFGS-B": scipy_minimise("L-BFGS-B", gtol=0.0, ftol=0.0, maxiter=BUDGET),
    "scipy BFGS": scipy_minimise("BFGS", gtol=0.0, maxiter=BUDGET),
}


def ours(solver: solvers.Solver | None) -> Method:
    """Evaluations of one of our solvers."""

    def evaluations(problem: Collected) -> float:
        solution = run(problem, solver)
        return float(solution.evaluations) if solved(problem, solution.value) else math.inf

    return evaluations


def methods(kind: str) -> dict[str, Method]:
    """The columns of a kind: those that minimise an energy need one."""
    own = {n: ours(s) for n, s in OURS.items() if kind == "minimisers" or "LBFGS" not in n}
    return own | PEERS | (MINIMISING if kind == "minimisers" else {})


def summary(counts: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row a method: problems solved, and the median ratio to our default."""
    reference = counts["ours, default"]
    rows = []
    for name, values in counts.items():
        pairs = zip(values, reference, strict=True)
        ratios = [v / r for v, r in pairs if math.isfinite(v) and math.isfinite(r)]
        row = {"method": name, "solved": sum(math.isfinite(value) for value in values)}
        middle = statistics.median(ratios) if ratios else math.nan
        rows.append(row | {"median evaluations / ours": middle})
    return rows


def main(
    kinds: tuple[Literal["maps", "systems", "minimisers"], ...] = ("maps", "systems", "minimisers"),
) -> None:
    """Ours, torchdeq's and scipy's solvers on other people's problems."""
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    for kind in kinds:
        problems = KINDS[kind]
        counts = {n: [method(each) for each in problems] for n, method in methods(kind).items()}
        print(f"\n{len(problems)} {kind}\n\n{table(summary(counts))}")
        pairs = zip(problems, counts["ours, default"], strict=True)
        missed = [problem.name for problem, number in pairs if number == math.inf]
        print(f"not solved by our default: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    tyro.cli(main)

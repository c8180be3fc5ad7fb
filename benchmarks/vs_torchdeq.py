"""Our solvers against torchdeq's, in one run: python benchmarks/vs_torchdeq.py [--rounds 40] [--parts step]

Parts: step (training step, VJPs, overhead, memory), energy, batch and zoo, with ratios ours / torchdeq; maps,
systems and minimisers are other people's problems, with scipy's solvers, too.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from scipy.optimize import minimize, root
from torch import Tensor
from torchdeq.solver import get_solver

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the zoo lives with the tests

import solvers
from benchmarks.measure import table
from benchmarks.step import B, race
from benchmarks.torchdeq_counts import Enough, best, count
from implicit_attn import DEQ, GradientStep
from implicit_attn.energies import BiSoftmaxAttention, Quadratic, ReLUFeedForward
from problems import collected, zoo
from problems.collected import BUDGET, ROUNDING, TOLERANCE, Collected
from problems.zoo import ZooProblem

# --- (b) the exact energy ------------------------------------------------------------------------


def part_energy() -> None:
    """The exact bi-softmax + ReLU energy at N 16, d 64, 4 heads, M 128, epsilon 1."""
    rows: list[dict[str, Any]] = []
    for a, b in ((0.2, 0.2), (0.4, 0.2), (1.0, 0.3)):
        torch.manual_seed(0)
        energy = a * BiSoftmaxAttention(64, heads=4) + b * ReLUFeedForward(64, 128) + Quadratic()
        x = torch.randn(B, 16, 64)
        ours: dict[str, solvers.Solver | None] = {
            "default (L-BFGS)": None,
            "anderson": solvers.Anderson(),
            "broyden": solvers.Broyden(),
        }
        for name, solver in ours.items():
            layer = DEQ(energy, solver=solver, tolerance=solvers.Tolerance(1e-3), max_steps=100)
            with torch.no_grad():
                solution = layer.solve(x, on_failure="ignore")
            counts = torch.where(solution.converged, solution.evaluations.double(), math.inf)
            rows.append(_energy_row(f"{a}, {b}", f"ours {name}", counts))
        for name, options in (
            ("anderson", {}),
            ("anderson", {"lam": 1e-8}),
            ("anderson", {"lam": 1e-8, "tau": 0.5}),
            ("broyden", {}),
            ("broyden", {"ls": True}),
            ("fixed_point_iter", {}),
            ("fixed_point_iter", {"tau": 0.5}),
        ):
            label = f"torchdeq {name} {options or ''}"
            rows.append(_energy_row(f"{a}, {b}", label, first_hits(energy, x, name, options)))
    print("\n(b) evaluations of energy and gradient to a relative residual of 1e-3, 64 samples\n")
    print(table(rows))


def _energy_row(weights: str, name: str, counts: Tensor) -> dict[str, Any]:
    middle = counts.sort().values[(len(counts) - 1) // 2].item()
    return {
        "weights": weights,
        "solver": name,
        "median": middle,
        "most": counts.max().item(),
        "converged": int(torch.isfinite(counts).sum()),
    }


def first_hits(energy: Any, x: Tensor, name: str, options: dict[str, Any]) -> Tensor:
    """Call of f at which each sample first met the tolerance under one of torchdeq's solvers."""
    step, seen = GradientStep(energy), []

    def f(z: Tensor) -> Tensor:
        fz = step(z, x)
        seen.append((fz - z).flatten(1).norm(dim=1) / fz.flatten(1).norm(dim=1))
        return fz

    with torch.no_grad():
        get_solver(name)(f, x, max_iter=100, tol=1e-3, stop_mode="rel", **options)
    met = torch.stack(seen) <= 1e-3
    first = met.double().argmax(0) + 1.0
    return torch.where(met.any(0), first, math.inf)


# --- (c) one hard sample ---------------------------------------------------------------------------


def part_batch() -> None:
    torch.manual_seed(0)
    size = 100
    radius = torch.full((64, 1), 0.3, dtype=torch.float64)
    radius[-1] = 0.98
    eigenvalues = radius * torch.linspace(-1, 1, size, dtype=torch.float64)
    x = torch.randn(64, size, dtype=torch.float64)
    billed = [0]

    def f(z: Tensor, x: Tensor, eigenvalues: Tensor) -> Tensor:
        billed[0] += len(z)
        return eigenvalues * z + x

    rows = []
    options: Any = {"tolerance": solvers.Tolerance(1e-6), "max_steps": 500, "adjoint": None}
    for solver in (solvers.Anderson(), solvers.Broyden(), solvers.Forward()):
        billed[0] = 0
        solvers.fixed_point(f, torch.zeros_like(x), (x, eigenvalues), solver=solver, **options)
        together = billed[0]
        name = {"Anderson": "anderson", "Broyden": "broyden", "Forward": "fixed_point_iter"}
        theirs = name[type(solver).__name__]
        billed[0] = 0
        limits: Any = {"max_iter": 1000, "tol": 1e-6, "stop_mode": "rel"}
        get_solver(theirs)(lambda z: f(z, x, eigenvalues), torch.zeros_like(x), **limits)
        row = {"solver": type(solver).__name__, "samples evaluated": together}
        rows.append(row | {"torchdeq": billed[0], "ours / torchdeq": together / billed[0]})
    print("\n(c) 63 easy samples and a hard one, to 1e-6\n")
    print(table(rows))


# --- the problem zoo -------------------------------------------------------------------------------

OURS: dict[str, solvers.Solver | None] = {
    "default": None,
    "anderson(20)": solvers.Anderson(memory=20),
    "anderson(50)": solvers.Anderson(memory=50),
    "broyden": solvers.Broyden(),
    "newton": solvers.Newton(),
    "forward": solvers.Forward(),
}


class Monitored(solvers.EnergyUpdate):
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
        return solvers.fixed_point(Monitored(f, problem) if guarded else f, z0, args, **options)

    return count(problem, TOLERANCE, BUDGET, run)


def zoo_row(name: str) -> dict[str, Any]:
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
    """Medians of the ratios."""
    lines = []
    for key in ("default / theirs", "best / theirs", "billed, default / theirs"):
        ratios = [r[key] for r in rows if not math.isnan(r[key])]
        middle = statistics.median(ratios)
        lines.append(f"median of {key}: {middle:.2f} over {len(ratios)} problems")
    return "\n".join(lines)


def part_zoo() -> None:
    """Ours against the best of torchdeq's solvers, to the same true relative residual.

    "First hit" counts evaluations until a sample first meets it; "billed" until the solver returns, which for
    torchdeq's best is when the worst sample of the batch is done.
    """
    rows = [zoo_row(name) for name in zoo.SOLVABLE]
    print(f"\nzoo: evaluations to a true relative residual of {TOLERANCE:g}, median over samples\n")
    print(table(rows))
    print(f"\n{summary(rows)}")


# --- other people's problems --------------------------------------------------------------------------

Method = Callable[[Collected], float]
KINDS = {
    "maps": collected.MAPS, "systems": collected.SYSTEMS, "minimisers": collected.MINIMISERS,
}  # fmt: skip
OUR_METHODS: dict[str, solvers.Solver | None] = {
    "ours, default": None,
    "ours, Anderson": solvers.Anderson(),
    "ours, Broyden": solvers.Broyden(),
}


class Counter:
    """The problem's f, counted; raises :class:`Enough` at the first point that meets the criterion."""

    def __init__(self, problem: Collected) -> None:
        self.problem, self.calls = problem, 0
        self.reached = math.inf  # the evaluation that met the criterion

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
    return peer(
        lambda f, problem: get_solver(name)(
            f, problem.z0, max_iter=BUDGET, tol=0.0, stop_mode="rel"
        )
    )


def scipy_root(method: str, **options: Any) -> Method:
    return peer(lambda f, problem: root(f.minus, problem.z0[0], method=method, options=options))


def scipy_minimise(method: str, **options: Any) -> Method:
    return peer(
        lambda f, problem: minimize(
            f.energy, problem.z0[0], jac=True, method=method, options=options
        )
    )


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


def our_method(solver: solvers.Solver | None) -> Method:
    """Evaluations of one of our solvers."""

    def evaluations(problem: Collected) -> float:
        solution = collected.run(problem, solver)
        solved = collected.solved(problem, solution.value)
        return float(solution.evaluations) if solved else math.inf

    return evaluations


def methods(kind: str) -> dict[str, Method]:
    """The columns of a kind: those that minimise an energy need one."""
    own = {name: our_method(solver) for name, solver in OUR_METHODS.items()}
    return own | PEERS | (MINIMISING if kind == "minimisers" else {})


def methods_table(counts: dict[str, list[float]]) -> list[dict[str, Any]]:
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


def part_others(kind: str) -> None:
    """Ours, torchdeq's and scipy's solvers on other people's problems of a kind.

    ``tests/problems/collected.py`` has 17 maps ``z = f(z)``, 20 systems ``F = 0`` posed as ``z = z - F(z)``
    and 33 minimisers posed as ``z = z - gradient``, each with its published start, in float64. A problem is
    solved where ``|f(z) - z| <= 1e-6 max(1, |z|)``, recomputed by us, after at most 500 evaluations of f, or
    of an energy with its gradient. A peer is stopped at its first evaluation of such a point. Ours stop
    themselves and are charged until they return, Jacobian products included. A ratio is the evaluations of a
    method over those of our default, median over the problems that both solve.
    """
    warnings.simplefilter("ignore")  # of peers that run into numbers they cannot take
    problems = KINDS[kind]
    counts = {n: [method(each) for each in problems] for n, method in methods(kind).items()}
    print(f"\n{len(problems)} {kind}\n\n{table(methods_table(counts))}")


Part = Literal["step", "energy", "batch", "zoo", "maps", "systems", "minimisers"]
PARTS: dict[str, Callable[[], None]] = {
    "energy": part_energy,
    "batch": part_batch,
    "zoo": part_zoo,
    **{kind: partial(part_others, kind) for kind in KINDS},
}


def main(parts: tuple[Part, ...] = ("step", "energy", "batch", "zoo"), rounds: int = 40) -> None:
    """Ours against torchdeq's solvers, part by part; ``rounds`` of the training step are timed."""
    torch.set_num_threads(2)
    warnings.simplefilter("ignore", solvers.SolveWarning)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in parts:
        race(rounds) if name == "step" else PARTS[name]()


if __name__ == "__main__":
    tyro.cli(main)

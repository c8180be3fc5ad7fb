"""Our solvers against torchdeq's, in one run: python benchmarks/vs_torchdeq.py [--rounds 40] [--parts step]

Parts: step (training step, VJPs, overhead, memory), energy, batch, zoo. Ratios are ours / torchdeq.
"""

from __future__ import annotations

import math
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor
from torchdeq.solver import get_solver

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the zoo lives with the tests

import solvers
from benchmarks.measure import table
from benchmarks.step import B, part_step
from cases.torchdeq_oracle import best, count
from implicit_attn import DEQ, GradientStep
from implicit_attn.energies import BiSoftmaxAttention, Quadratic, ReLUFeedForward
from problems import zoo
from problems.zoo import ZooProblem

# --- (b) the exact energy ------------------------------------------------------------------------


def part_energy(rounds: int) -> None:
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
            "newton": solvers.Newton(),
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


def part_batch(rounds: int) -> None:
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

    def total(rows: slice, solver: solvers.Solver) -> int:
        billed[0] = 0
        part = x[rows]
        options: Any = {"tolerance": solvers.Tolerance(1e-6), "max_steps": 500, "adjoint": None}
        start = torch.zeros_like(part)
        solvers.fixed_point(f, start, (part, eigenvalues[rows]), solver=solver, **options)
        return billed[0]

    rows = []
    for solver in (solvers.Anderson(), solvers.Broyden(), solvers.Forward()):
        together = total(slice(None), solver)
        alone = sum(total(slice(i, i + 1), solver) for i in range(64))
        name = {"Anderson": "anderson", "Broyden": "broyden", "Forward": "fixed_point_iter"}
        theirs = name[type(solver).__name__]
        billed[0] = 0
        limits: Any = {"max_iter": 1000, "tol": 1e-6, "stop_mode": "rel"}
        get_solver(theirs)(lambda z: f(z, x, eigenvalues), torch.zeros_like(x), **limits)
        row = {"solver": type(solver).__name__, "samples evaluated": together}
        row |= {"sum over single solves": alone, "ratio": together / alone}
        rows.append(row | {"torchdeq": billed[0], "ours / torchdeq": together / billed[0]})
    print("\n(c) 63 easy samples and a hard one, to 1e-6\n")
    print(table(rows))


# --- the problem zoo -------------------------------------------------------------------------------

TOLERANCE, BUDGET = 1e-6, 500
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


def part_zoo(rounds: int) -> None:
    """Ours against the best of torchdeq's solvers, problem by problem.

    Two counts, both to the same true relative residual ``|f(z) - z| / |f(z)|``:

    * *first hit*: evaluations until a sample first meets it, as if torchdeq could stop sample by sample;
    * *billed*: evaluations that a sample is charged until the solver returns. Ours stop per sample; the
      best of torchdeq's stops when the worst sample of the batch is done, and bills them all.
    """
    rows = [zoo_row(name) for name in zoo.SOLVABLE]
    print(f"\nzoo: evaluations to a true relative residual of {TOLERANCE:g}, median over samples\n")
    print(table(rows))
    print(f"\n{summary(rows)}")


PARTS: dict[str, Callable[[int], None]] = {
    "step": part_step, "energy": part_energy, "batch": part_batch, "zoo": part_zoo,
}  # fmt: skip


def main(
    parts: tuple[Literal["step", "energy", "batch", "zoo"], ...] = (
        "step",
        "energy",
        "batch",
        "zoo",
    ),
    rounds: int = 40,
) -> None:
    """Ratios ours / torchdeq; ``rounds`` of the training step are timed."""
    torch.set_num_threads(2)
    warnings.simplefilter("ignore", solvers.SolveWarning)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in parts:
        PARTS[name](rounds)


if __name__ == "__main__":
    tyro.cli(main)

"""Our solvers against torchdeq's, in one run: python benchmarks/vs_torchdeq.py [--rounds 40] [part ...]

Parts: step (training step, VJPs, overhead, memory), energy, batch, zoo. Ratios are ours / torchdeq.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchdeq.core import get_deq
from torchdeq.solver import get_solver

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the zoo lives with the tests

import solvers
from benchmarks import zoo
from benchmarks.layers import MeanField, hyper_energy
from benchmarks.measure import interleaved, peak_bytes, table
from implicit_attn import DEQ, GradientStep

TORCHDEQ = ("anderson", "broyden", "fixed_point_iter")
# What every contestant of the training step must reach: true residual, gradient error.
TARGETS = ((1e-4, 1e-3), (1e-6, 1e-5))
TOLERANCES = [10 ** (-k / 2) for k in range(4, 17)]
Pair = tuple[float, float]  # tolerances of the forward and of the backward solve


# --- (a) the training step ---------------------------------------------------------------------


class Ours:
    def __init__(self, layer: MeanField, solver: solvers.Solver | None) -> None:
        self.layer, self.solver = layer, solver

    def step(self, tolerances: Pair) -> Tensor:
        couplings, layer = self.layer.couplings(), self.layer
        solution = solvers.fixed_point(
            lambda z, x: layer.update(z, x, couplings),
            torch.zeros_like(layer.x),
            (layer.x,),
            solver=self.solver,
            tolerance=solvers.Tolerance(tolerances[0]),
            adjoint=solvers.Implicit(tolerance=solvers.Tolerance(tolerances[1])),
            max_steps=200,
        )
        layer.zero_grad()
        solution.value.backward(layer.cotangent)
        return solution.value.detach()


class Theirs:
    def __init__(self, layer: MeanField, solver: str) -> None:
        self.layer, self.solver = layer, solver
        self.deq: dict[Pair, Any] = {}

    def step(self, tolerances: Pair) -> Tensor:
        if tolerances not in self.deq:
            self.deq[tolerances] = get_deq(
                ift=True,
                f_solver=self.solver,
                b_solver=self.solver,
                f_tol=tolerances[0],
                b_tol=tolerances[1],
                f_stop_mode="rel",
                b_stop_mode="rel",
                f_max_iter=200,
                b_max_iter=200,
            )
        couplings, layer = self.layer.couplings(), self.layer
        outputs, _ = self.deq[tolerances](
            lambda z: layer.update(z, layer.x, couplings), torch.zeros_like(layer.x)
        )
        layer.zero_grad()
        outputs[-1].backward(layer.cotangent)
        return outputs[-1].detach()


def loosest(layer: MeanField, contestant: Any, target: Pair, exact: Any) -> tuple[Pair, Pair]:
    """The loosest tolerances that reach the target, and what they reach."""
    tight = TOLERANCES[-1]

    def met(tolerances: Pair, which: int) -> bool:
        return errors(layer, contestant.step(tolerances), exact)[which] <= target[which]

    forward = next((t for t in TOLERANCES if met((t, tight), 0)), tight)
    backward = next((t for t in TOLERANCES if met((forward, t), 1)), tight)
    chosen = (forward, backward)
    return chosen, errors(layer, contestant.step(chosen), exact)


def errors(layer: MeanField, z: Tensor, exact: tuple[Tensor, list[Tensor]]) -> tuple[float, float]:
    """Worst true relative residual of a sample, and relative error of the parameter gradient."""
    with torch.no_grad():
        fz = layer.update(z, layer.x, layer.couplings())
    residual = ((fz - z).flatten(1).norm(dim=1) / fz.flatten(1).norm(dim=1)).max().item()
    got = torch.cat([p.grad.flatten().double() for p in layer.parameters() if p.grad is not None])
    want = torch.cat([g.flatten() for g in exact[1]])
    return residual, ((got - want).norm() / want.norm()).item()


def part_step(rounds: int) -> None:
    for scale in (1.0, 2.0):
        layer = MeanField(scale)
        exact = layer.exact()
        contestants: dict[str, Any] = {f"torchdeq {name}": Theirs(layer, name) for name in TORCHDEQ}
        contestants |= {
            "ours anderson": Ours(layer, solvers.Anderson()),
            "ours broyden": Ours(layer, solvers.Broyden()),
            "ours forward": Ours(layer, solvers.Forward()),
            "ours default": Ours(layer, None),
        }
        for target in TARGETS:
            rows = _race(layer, contestants, target, exact, rounds)
            print(
                f"\n(a) training step, mean-field layer, couplings x {scale:g}; "
                f"residual <= {target[0]:g}, gradient error <= {target[1]:g}\n"
            )
            print(table(rows))


def _race(
    layer: MeanField, contestants: dict[str, Any], target: Pair, exact: Any, rounds: int
) -> list[dict[str, Any]]:
    found = {name: loosest(layer, each, target, exact) for name, each in contestants.items()}
    runs: dict[str, Callable[[], object]] = {
        name: _runner(contestants[name], found[name][0]) for name in contestants
    }
    seconds = interleaved(runs, rounds)
    meets = {n: r[0] <= target[0] and r[1] <= target[1] for n, (_, r) in found.items()}
    fastest = min(t for n, t in seconds.items() if n.startswith("torchdeq") and meets[n])
    rows: list[dict[str, Any]] = []
    for name, (tolerances, reached) in found.items():
        f, vjp, overhead = _account(layer, contestants[name], tolerances)
        same = "torchdeq " + name.split()[1].replace("forward", "fixed_point_iter")
        rows.append(
            {
                "solver": name if meets[name] else f"{name} (target missed)",
                "residual": reached[0],
                "gradient error": reached[1],
                "ms": 1e3 * seconds[name],
                "/ its torchdeq": seconds[name] / seconds[same] if same in seconds else "",
                "/ fastest torchdeq": seconds[name] / fastest,
                "f": f,
                "vjp": vjp,
                "overhead": overhead,
                "peak MB": peak_bytes(runs[name]) / 2**20,
            }
        )
    return rows


def _runner(contestant: Any, tolerances: Pair) -> Callable[[], Tensor]:
    return lambda: contestant.step(tolerances)


def _account(layer: MeanField, contestant: Any, tolerances: Pair) -> tuple[int, int, float]:
    """Calls of f, VJPs, and the share of a step spent in neither."""
    spent, calls = [0.0, 0.0], [0, 0]
    update, grad = layer.update, torch.autograd.grad

    def timed(index: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            spent[index] += time.perf_counter() - start
            calls[index] += 1
            return result

        return run

    layer.update, torch.autograd.grad = timed(0, update), timed(1, grad)  # type: ignore[method-assign]
    shares, repeats = [], 15
    try:
        for _ in range(repeats):
            spent[:] = [0.0, 0.0]
            start = time.perf_counter()
            contestant.step(tolerances)
            shares.append(1 - sum(spent) / (time.perf_counter() - start))
    finally:
        layer.update, torch.autograd.grad = update, grad  # type: ignore[method-assign]
    return calls[0] // repeats, calls[1] // repeats, statistics.median(shares)


# --- (b) the exact energy ------------------------------------------------------------------------


def part_energy(rounds: int) -> None:
    rows: list[dict[str, Any]] = []
    for a, b in ((0.2, 0.2), (0.4, 0.2), (1.0, 0.3)):
        energy, x = hyper_energy(a, b)
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
        solvers.fixed_point(
            f,
            torch.zeros_like(part),
            (part, eigenvalues[rows]),
            solver=solver,
            tolerance=solvers.Tolerance(1e-6),
            max_steps=500,
            adjoint=None,
        )
        return billed[0]

    rows = []
    for solver in (solvers.Anderson(), solvers.Broyden(), solvers.Forward()):
        together = total(slice(None), solver)
        alone = sum(total(slice(i, i + 1), solver) for i in range(64))
        name = {"Anderson": "anderson", "Broyden": "broyden", "Forward": "fixed_point_iter"}
        theirs = name[type(solver).__name__]
        billed[0] = 0
        get_solver(theirs)(
            lambda z: f(z, x, eigenvalues),
            torch.zeros_like(x),
            max_iter=1000,
            tol=1e-6,
            stop_mode="rel",
        )
        rows.append(
            {
                "solver": type(solver).__name__,
                "samples evaluated": together,
                "sum over single solves": alone,
                "ratio": together / alone,
                "torchdeq": billed[0],
                "ours / torchdeq": together / billed[0],
            }
        )
    print("\n(c) 63 easy samples and a hard one, to 1e-6\n")
    print(table(rows))


# --- the zoo -----------------------------------------------------------------------------------------


def part_zoo(rounds: int) -> None:
    rows = zoo.compare()
    print(
        f"\nzoo: evaluations to a true relative residual of {zoo.TOLERANCE:g}, median over samples\n"
    )
    print(table(rows))
    print(f"\n{zoo.summary(rows)}")


PARTS = {"step": part_step, "energy": part_energy, "batch": part_batch, "zoo": part_zoo}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(2)
    warnings.simplefilter("ignore", solvers.SolveWarning)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in options.parts or PARTS:
        PARTS[name](options.rounds)


if __name__ == "__main__":
    main()

"""Our solvers against torchdeq's, in one run: python benchmarks/vs_torchdeq.py [--rounds 40] [--parts step]

Parts: step (a training step), energy, batch and zoo, with ratios ours / torchdeq; maps, systems and
minimisers are other people's problems, with scipy's solvers, too.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
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
from implicit_attn import DEQ, GradientStep
from implicit_attn.energies import BiSoftmaxAttention, Quadratic, ReLUFeedForward
from problems import collected, residual_norms, rows, zoo
from problems.collected import BUDGET, ROUNDING, TOLERANCE, Collected
from problems.zoo import ZooProblem


def part_energy() -> None:
    """The exact bi-softmax + ReLU energy at N 16, d 64, 4 heads, M 128, epsilon 1."""
    rows: list[dict[str, Any]] = []
    for a, b in ((0.2, 0.2), (0.4, 0.2), (1.0, 0.3)):
        torch.manual_seed(0)
        energy = a * BiSoftmaxAttention(64, heads=4) + b * ReLUFeedForward(64, 128) + Quadratic()
        x = torch.randn(B, 16, 64)
        for solver in (None, "anderson", "broyden"):
            layer = DEQ(energy, solver=solver, tolerance=solvers.Tolerance(1e-3), max_steps=100)
            with torch.no_grad():
                solution = layer.solve(x, on_failure="ignore")
            counts = torch.where(solution.converged, solution.evaluations.double(), math.inf)
            name = f"ours {solver or 'default (L-BFGS)'}"
            rows.append(_energy_row(f"{a}, {b}", name, counts))
        for name, options in (
            ("anderson", {}), ("anderson", {"lam": 1e-8}), ("anderson", {"lam": 1e-8, "tau": 0.5}),
            ("broyden", {}), ("broyden", {"ls": True}),
            ("fixed_point_iter", {}), ("fixed_point_iter", {"tau": 0.5}),
        ):  # fmt: skip
            label = f"torchdeq {name} {options or ''}"
            rows.append(_energy_row(f"{a}, {b}", label, first_hits(energy, x, name, options)))
    print("\n(b) evaluations of energy and gradient to a relative residual of 1e-3, 64 samples\n")
    print(table(rows))


def _energy_row(weights: str, name: str, counts: Tensor) -> dict[str, Any]:
    middle = counts.sort().values[(len(counts) - 1) // 2].item()
    row: dict[str, Any] = {"weights": weights, "solver": name, "median": middle}
    return row | {"most": counts.max().item(), "converged": int(torch.isfinite(counts).sum())}


def first_hits(energy: Any, x: Tensor, name: str, options: dict[str, Any]) -> Tensor:
    """Call of f at which each sample first met the tolerance under one of torchdeq's solvers."""
    step, seen = GradientStep(energy), []

    def f(z: Tensor) -> Tensor:
        fz = step(z, x)
        seen.append(true_residual(z, fz))
        return fz

    with torch.no_grad():
        get_solver(name)(f, x, max_iter=100, tol=1e-3, stop_mode="rel", **options)
    met = torch.stack(seen) <= 1e-3
    first = met.double().argmax(0) + 1.0
    return torch.where(met.any(0), first, math.inf)


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
    limits: Any = {"max_iter": 1000, "tol": 1e-6, "stop_mode": "rel"}
    for name, theirs in (
        ("anderson", "anderson"), ("broyden", "broyden"), ("forward", "fixed_point_iter")
    ):  # fmt: skip
        billed[0] = 0
        solvers.fixed_point(f, torch.zeros_like(x), (x, eigenvalues), solver=name, **options)
        together, billed[0] = billed[0], 0
        get_solver(theirs)(lambda z: f(z, x, eigenvalues), torch.zeros_like(x), **limits)
        row = {"solver": name, "samples evaluated": together}
        rows.append(row | {"torchdeq": billed[0], "ours / torchdeq": together / billed[0]})
    print("\n(c) 63 easy samples and a hard one, to 1e-6\n")
    print(table(rows))


# --- the problem zoo -------------------------------------------------------------------------------

# The count of a sample is the number of calls of f up to the first one at a point z whose true relative
# residual is within the tolerance; infinite if there is none. It is taken inside f: stopping late costs
# nothing, and neither does a bad choice of the iterate to return.
Run = Callable[[Callable[..., Tensor], Tensor, tuple[Any, ...]], Any]

# name -> (torchdeq's name, its options, whether its samples influence each other)
SOLVERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "anderson": ("anderson", {}, False),
    "anderson_ridge_1e-10": ("anderson", {"lam": 1e-10}, False),
    "anderson_tau_0.5": ("anderson", {"tau": 0.5}, False),
    "broyden": ("broyden", {}, False),
    "broyden_line_search": ("broyden", {"ls": True}, True),
    "fixed_point_iter": ("fixed_point_iter", {}, False),
    "fixed_point_iter_tau_0.5": ("fixed_point_iter", {"tau": 0.5}, False),
}
# A solver that stops on the same test, rounded differently, must not miss by an ulp
LAST_DIGITS = 1e-6


class Enough(Exception):
    """Ends a solver from inside f: the criterion is met, or the budget is spent."""


def true_residual(z: Tensor, fz: Tensor) -> Tensor:
    """``|f(z) - z| / |f(z)|`` per sample, (B,) float64; infinite where either is not finite."""
    residual, reference = (norm.detach().double() for norm in residual_norms(z, fz))
    finite = residual.isfinite() & reference.isfinite()
    relative = torch.where(finite, residual / reference, math.inf)
    return torch.where(residual == 0, torch.zeros_like(relative), relative)


@dataclass
class Recorder:
    """``problem.f`` that notes at which call each sample's true residual met the tolerance.

    Pass the recorder as f and ``recorder.args`` as args, which end with the numbers of the samples.
    """

    problem: ZooProblem
    tolerance: float
    max_evaluations: float = math.inf
    stop_when_done: bool = False
    calls: Tensor = field(init=False)  # (B,) evaluations of f spent on each sample
    reached: Tensor = field(init=False)  # (B,) the call that first met the tolerance, or infinity

    def __post_init__(self) -> None:
        batch = self.problem.batch
        self.calls = torch.zeros(batch, dtype=torch.int64)
        self.reached = torch.full((batch,), math.inf, dtype=torch.float64)

    @property
    def args(self) -> tuple[Any, ...]:
        return (*self.problem.args, torch.arange(self.problem.batch))

    def __call__(self, z: Tensor, *args: Any) -> Tensor:
        index = args[-1]
        if bool((self.calls[index] >= self.max_evaluations).all()):
            raise Enough
        fz = self.problem.f(z, *args[:-1])
        relative = true_residual(z.detach(), fz.detach())
        self.calls[index] += 1
        hit = (relative <= self.tolerance * (1 + LAST_DIGITS)) & self.reached[index].isinf()
        hit &= self.calls[index] <= self.max_evaluations
        self.reached[index] = torch.where(hit, self.calls[index].double(), self.reached[index])
        if self.stop_when_done and bool(self.reached.isfinite().all()):
            raise Enough
        return fz


def order(evaluations: Tensor) -> tuple[float, float, float]:
    """Of counts (B,), smaller is better: samples that failed, median, maximum."""
    middle = statistics.median(evaluations.tolist())
    return float(evaluations.isinf().sum()), middle, float(evaluations.max())


def count(problem: ZooProblem, tolerance: float, max_evaluations: float, run: Run) -> Tensor:
    """Evaluations (B,) float64 that ``run(f, z0, args)`` of one of our solvers needs.

    A sample is charged those of its solution at least: f sees no products with the Jacobian. It may have met
    the tolerance at ``value`` without a call of f, by an energy's gradient.
    """
    recorder = Recorder(problem, tolerance)
    result = run(recorder, problem.z0.clone(), recorder.args)
    with torch.no_grad():
        relative = true_residual(result.value, problem.f(result.value, *problem.args))
    met, spent = recorder.reached.isfinite(), result.evaluations.double()
    charge = torch.where(met, torch.maximum(recorder.reached, spent), spent)
    arrived = met | (relative <= tolerance * (1 + LAST_DIGITS))
    reached = torch.where(arrived, charge, math.inf)
    return torch.where(reached <= max_evaluations, reached, math.inf)


def evaluations_to(
    tolerance: float, problem: ZooProblem, solver_name: str, max_evaluations: int = 500
) -> Tensor:
    """Evaluations (B,) that a torchdeq solver of ``SOLVERS`` needs, infinite where it fails.

    A batch whose solver raised, or whose samples influence each other by design, is run sample by sample.
    """
    if not SOLVERS[solver_name][2] or problem.batch == 1:
        together, ended = _solve(problem, tolerance, solver_name, max_evaluations)
        if ended or problem.batch == 1:
            return together
    alone = [rows(problem, torch.tensor([i])) for i in range(problem.batch)]
    return torch.cat([evaluations_to(tolerance, p, solver_name, max_evaluations) for p in alone])


def best(problem: ZooProblem, tolerance: float, max_evaluations: int = 500) -> tuple[str, Tensor]:
    """Name and evaluations (B,) of torchdeq's best solver: fewest failures, then median."""
    found = {n: evaluations_to(tolerance, problem, n, max_evaluations) for n in SOLVERS}
    winner = min(found, key=lambda name: order(found[name]))
    return winner, found[winner]


def _solve(
    problem: ZooProblem, tolerance: float, solver_name: str, max_evaluations: int
) -> tuple[Tensor, bool]:
    """Counts of one run of torchdeq, its own stopping test off (tolerance 0), and whether it ended well."""
    name, options, _ = SOLVERS[solver_name]
    recorder = Recorder(problem, tolerance, max_evaluations, stop_when_done=True)
    args = recorder.args
    options = {"max_iter": max_evaluations, "tol": 0.0, "stop_mode": "rel", **options}
    try:
        with torch.no_grad():
            get_solver(name)(lambda z: recorder(z, *args), problem.z0.clone(), **options)
    except Enough:
        pass
    except Exception:  # torchdeq's own failures
        return recorder.reached, False
    return recorder.reached, True


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


def part_zoo() -> None:
    """Ours against the best of torchdeq's solvers, to the same true relative residual.

    "Billed" counts evaluations until the solver returns, for torchdeq until the worst sample is done.
    """
    rows = [zoo_row(name) for name in zoo.SOLVABLE]
    print(f"\nzoo: evaluations to a true relative residual of {TOLERANCE:g}, median over samples\n")
    print(table(rows))
    for key in ("default / theirs", "best / theirs", "billed, default / theirs"):
        ratios = [row[key] for row in rows if not math.isnan(row[key])]
        middle = statistics.median(ratios)
        print(f"median of {key}: {middle:.2f} over {len(ratios)} problems")


# --- other people's problems --------------------------------------------------------------------------

Method = Callable[[Collected], float]
KINDS = {"maps": collected.MAPS, "systems": collected.SYSTEMS, "minimisers": collected.MINIMISERS}
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
        return (point(x) - self(point(x))).numpy()[0]

    def energy(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """Energy and gradient, one evaluation."""
        return float(self.problem.function(point(x))), self.minus(x)


def point(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(x, dtype=float)).reshape(1, -1)


def peer(solve: Callable[[Counter, Collected], Any], problem: Collected) -> float:
    """Evaluations that a peer's ``solve(counter, problem)`` needs, infinite where it fails."""
    counter = Counter(problem)
    with contextlib.suppress(Exception):  # a peer's own failure counts as not solved
        solve(counter, problem)
    return counter.reached


def torchdeq(name: str) -> Method:
    limits: Any = {"max_iter": BUDGET, "tol": 0.0, "stop_mode": "rel"}
    return partial(peer, lambda f, problem: get_solver(name)(f, problem.z0, **limits))


def scipy_root(method: str, **options: Any) -> Method:
    known: Any = {"method": method, "options": options}
    return partial(peer, lambda f, problem: root(f.minus, problem.z0[0], **known))


def scipy_minimise(method: str, **options: Any) -> Method:
    known: Any = {"jac": True, "method": method, "options": options}
    return partial(peer, lambda f, problem: minimize(f.energy, problem.z0[0], **known))


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


def ours(solver: solvers.Solver | None, problem: Collected) -> float:
    """Evaluations of one of our solvers."""
    solution = collected.run(problem, solver)
    solved = collected.solved(problem, solution.value)
    return float(solution.evaluations) if solved else math.inf


def methods(kind: str) -> dict[str, Method]:
    """The columns of a kind: those that minimise an energy need one."""
    own: dict[str, Method] = {name: partial(ours, solver) for name, solver in OUR_METHODS.items()}
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
    """Ours, torchdeq's and scipy's solvers on the problems of a kind in ``tests/problems/collected.py``.

    A problem is solved where ``|f(z) - z| <= 1e-6 max(1, |z|)`` after at most 500 evaluations of f, or of an
    energy with its gradient. A peer is stopped at its first such point; ours are charged until they return. A
    ratio is the evaluations of a method over those of our default, median over the problems that both solve.
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

"""How many evaluations torchdeq's solvers, and ours, need on the zoo.

The count of a sample is the number of calls of f up to the first one at a point z whose *true* relative
residual ``|f(z) - z| / |f(z)|`` is within the tolerance; infinite if there is none. It is taken inside f:
stopping late costs nothing, and neither does a bad choice of the iterate to return.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchdeq.solver import get_solver

from problems import residual_norms, rows
from problems.zoo import ZooProblem

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
    """``|f(z) - z| / |f(z)|`` per sample, (B,) float64 on the CPU; infinite where not finite.

    ``|f(z)|`` may overflow where the difference does not: that is no small residual.
    """
    residual, reference = (norm.detach().double().cpu() for norm in residual_norms(z, fz))
    finite = residual.isfinite() & reference.isfinite()
    relative = torch.where(finite, residual / reference, math.inf)
    return torch.where(residual == 0, torch.zeros_like(relative), relative)


@dataclass
class Recorder:
    """``problem.f`` that notes at which call each sample's true residual met the tolerance.

    Pass the recorder as f and ``recorder.args`` as args, which end with the numbers of the samples.

    Attributes:
        calls: (B,) evaluations of f spent on each sample.
        reached: (B,) the call at which the tolerance was first met, infinite if it was not.
    """

    problem: ZooProblem
    tolerance: float
    max_evaluations: float = math.inf
    stop_when_done: bool = False
    calls: Tensor = field(init=False)
    reached: Tensor = field(init=False)

    def __post_init__(self) -> None:
        batch = self.problem.batch
        self.calls = torch.zeros(batch, dtype=torch.int64)
        self.reached = torch.full((batch,), math.inf, dtype=torch.float64)

    @property
    def args(self) -> tuple[Any, ...]:
        """The problem's arguments and the number of each sample (B,)."""
        index = torch.arange(self.problem.batch, device=self.problem.z0.device)
        return (*self.problem.args, index)

    def __call__(self, z: Tensor, *args: Any) -> Tensor:
        index = args[-1].cpu()
        if bool((self.calls[index] >= self.max_evaluations).all()):
            raise Enough
        fz = self.problem.f(z, *args[:-1])
        self._note(index, z.detach(), fz.detach())
        if self.stop_when_done and bool(self.reached.isfinite().all()):
            raise Enough
        return fz

    def _note(self, index: Tensor, z: Tensor, fz: Tensor) -> None:
        relative = true_residual(z, fz)
        self.calls[index] += 1
        hit = (relative <= self.tolerance * (1 + LAST_DIGITS)) & self.reached[index].isinf()
        hit &= self.calls[index] <= self.max_evaluations
        self.reached[index] = torch.where(hit, self.calls[index].double(), self.reached[index])


def order(evaluations: Tensor) -> tuple[float, float, float]:
    """Of counts (B,), smaller is better: samples that failed, median, maximum."""
    return (
        float(evaluations.isinf().sum()),
        statistics.median(evaluations.tolist()),
        float(evaluations.max()),
    )


def count(problem: ZooProblem, tolerance: float, max_evaluations: float, run: Run) -> Tensor:
    """Evaluations (B,) float64 that ``run(f, z0, args)`` of one of our solvers needs.

    A sample is charged those of its solution at least, so that products with the Jacobian, which f cannot
    see, are billed; and it may have met the tolerance at ``value`` without a call of f, by an energy's
    gradient. Only its own end stops the run: a count beyond ``max_evaluations`` becomes infinite.
    """
    recorder = Recorder(problem, tolerance)
    result = run(recorder, problem.z0.clone(), recorder.args)
    with torch.no_grad():
        relative = true_residual(result.value, problem.f(result.value, *problem.args))
    met, spent = recorder.reached.isfinite(), result.evaluations.double().cpu()
    charge = torch.where(met, torch.maximum(recorder.reached, spent), spent)
    arrived = met | (relative <= tolerance * (1 + LAST_DIGITS))
    reached = torch.where(arrived, charge, math.inf)
    return torch.where(reached <= max_evaluations, reached, math.inf)


def evaluations_to(
    tolerance: float, problem: ZooProblem, solver_name: str, max_evaluations: int = 500
) -> Tensor:
    """Evaluations (B,) that a torchdeq solver of ``SOLVERS`` needs, infinite where it fails.

    A batch whose solver raised, or whose samples influence each other by design, is run again
    sample by sample: a sample's count is the best that torchdeq can do for it.
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

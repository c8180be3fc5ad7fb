"""Bridge to torchdeq, both ways: its solvers in :func:`solvers.fixed_point`, ours in its registry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchdeq.solver import get_solver, register_solver, solver_stat_from_final_step

from solvers.core.layout import row_norm
from solvers.core.problem import Problem
from solvers.core.rows import where_rows
from solvers.core.solution import Solution, Status
from solvers.core.solver import ExternalSolver, Solver
from solvers.core.tolerance import Tolerance
from solvers.fixed_points import fixed_point
from solvers.methods.anderson import Anderson

OPTIONS: dict[str, frozenset[str]] = {
    "anderson": frozenset({"m", "lam", "tau"}),
    "broyden": frozenset({"LBFGS_thres", "ls"}),
    "fixed_point_iter": frozenset({"tau"}),
    "simple_fixed_point_iter": frozenset({"tau"}),
}


@dataclass(frozen=True)
class TorchDEQ(ExternalSolver):
    """A solver of torchdeq's registry, watched from outside.

    torchdeq stops whole batches by its own criterion; here every evaluation of ``f`` is measured,
    the best point of each sample is kept with its own residual, and the run is ended as soon as all
    samples have converged or ``max_steps`` evaluations are spent. There is no safeguard.

    Args:
        name: "anderson", "broyden", "fixed_point_iter", "simple_fixed_point_iter" or a registered one.
        options: passed on, for example ``{"m": 5, "lam": 1e-8}``; unknown names raise.
    """

    name: str = "anderson"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name in OPTIONS:
            unknown = sorted(set(self.options) - OPTIONS[self.name])
            if unknown:
                known = sorted(OPTIONS[self.name])
                raise ValueError(f"options of {self.name} must be among {known}, got {unknown}")
        try:
            get_solver(self.name)
        except AssertionError as error:
            raise ValueError(
                f"name must be a solver known to torchdeq, got {self.name!r}"
            ) from error

    def run(
        self, problem: Problem, start: Tensor, tolerance: Tolerance, max_steps: int
    ) -> Solution:
        if torch.is_grad_enabled():
            raise RuntimeError("torchdeq's solvers cannot be unrolled here; use adjoint=Implicit()")
        watch = _Watch(problem, start, tolerance, max_steps)
        with contextlib.suppress(_Enough):
            # One more than the budget: the watch, not the solver, decides when to stop.
            get_solver(self.name)(
                watch, start, max_iter=max_steps + 3, tol=0.0, stop_mode="rel", **self.options
            )
        return watch.solution()


class _Enough(Exception):
    """The watch has seen enough."""


class _Watch:
    """``f`` with a memory: best iterate, residual and evaluations of every sample."""

    def __init__(
        self, problem: Problem, start: Tensor, tolerance: Tolerance, max_steps: int
    ) -> None:
        self.problem, self.tolerance, self.left = problem, tolerance, max_steps
        self.count = 0
        infinite = torch.full_like(row_norm(start), torch.inf)
        self.value, self.relative, self.norm = start, infinite, infinite
        self.done = torch.zeros_like(infinite, dtype=torch.bool)
        self.evaluations = torch.zeros_like(infinite, dtype=torch.int64)

    def __call__(self, z: Tensor, tau: float = 1.0) -> Tensor:
        if self.count == self.left or bool(self.done.all()):
            raise _Enough
        self.count += 1
        point = self.problem.evaluate(z)
        running = ~self.done
        relative = point.norm / point.reference.clamp_min(torch.finfo(point.norm.dtype).tiny)
        converged = running & (point.norm <= self.tolerance.threshold(point.reference))
        better = (running & (relative < self.relative)) | converged
        self.value = where_rows(better, z, self.value)
        self.relative = torch.where(better, relative, self.relative)
        self.norm = torch.where(better, point.norm, self.norm)
        self.evaluations = torch.where(running, self.count, self.evaluations)
        self.done = self.done | converged
        return z + tau * point.residual

    def solution(self) -> Solution:
        status = torch.where(self.done, int(Status.CONVERGED), int(Status.MAX_STEPS))
        unseen = ~torch.isfinite(self.relative)
        status = torch.where(unseen, int(Status.NONFINITE), status)
        return Solution(
            self.value, status, self.relative, self.norm, self.evaluations, self.evaluations
        )


def register(name: str, solver: Solver | None = None) -> None:
    """Make one of our solvers known to torchdeq, as ``f_solver=name`` or ``b_solver=name``.

    torchdeq's ``tol`` and ``stop_mode`` become our :class:`Tolerance`, ``max_iter`` our ``max_steps``.
    The statistics are torchdeq's, measured at the returned value, with our per-sample "status" and
    "evaluations" beside them. Unknown keyword arguments raise TypeError.
    """
    ours = Anderson() if solver is None else solver
    if not isinstance(ours, Solver):
        raise TypeError(f"solver must be a solvers.Solver, got {solver!r}")

    def solve(
        func: Callable[[Tensor], Tensor],
        x0: Tensor,
        max_iter: int = 50,
        tol: float = 1e-3,
        stop_mode: str = "abs",
        indexing: list[int] | None = None,
    ) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
        if stop_mode not in ("abs", "rel"):
            raise ValueError(f'stop_mode must be "abs" or "rel", got {stop_mode!r}')
        if indexing is not None and len(indexing) > 1:
            raise ValueError(
                f"this solver returns its final state only, but indexing={indexing!r} asks for "
                f"{len(indexing)} states"
            )
        relative = stop_mode == "rel"
        tolerance = Tolerance(rtol=tol if relative else 0.0, atol=0.0 if relative else tol)
        # torchdeq's functions close over the whole batch, so no sample may leave it.
        solution = fixed_point(
            func,
            x0,
            solver=ours,
            tolerance=tolerance,
            max_steps=max_iter,
            adjoint=None,
            compact=False,
        )
        with torch.no_grad():
            statistics = solver_stat_from_final_step(
                solution.value, func(solution.value), int(solution.steps.max())
            )
        statistics["status"] = solution.status
        statistics["evaluations"] = solution.evaluations
        return solution.value, [solution.value], statistics

    register_solver(name, solve)

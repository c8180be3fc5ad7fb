"""Use torchdeq's solvers in :func:`solvers.fixed_point`, and solvers of this package in torchdeq."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from solvers.core.checks import require_increasing, require_instance
from solvers.core.device import small_dtype
from solvers.core.loop import ExternalSolver, Solver
from solvers.core.problem import Problem
from solvers.core.rows import RUNNING, Best, Snapshots, row_norm
from solvers.core.solution import Solution, Status, Tolerance
from solvers.fixed_points import fixed_point
from solvers.methods.anderson import Anderson

try:
    from torchdeq.solver import get_solver, register_solver, solver_stat_from_final_step
except ImportError as error:
    raise ImportError(
        f"solvers.torchdeq_bridge needs torchdeq, which could not be imported ({error}): "
        'install it with `pip install ".[torchdeq]"` in a checkout of implicit-attn'
    ) from error

OPTIONS: dict[str, frozenset[str]] = {
    "anderson": frozenset({"m", "lam", "tau"}),
    "broyden": frozenset({"LBFGS_thres", "ls"}),
    "fixed_point_iter": frozenset({"tau"}),
    "simple_fixed_point_iter": frozenset({"tau"}),
}


@dataclass(frozen=True)
class TorchDEQ(ExternalSolver):
    """A solver of torchdeq's registry with the stopping criterion of :func:`solvers.fixed_point`.

    torchdeq stops whole batches by its own criterion. This class instead measures every evaluation of
    ``f`` and keeps the best point of each sample. The run ends when all samples have converged or
    after ``max_steps`` evaluations. There is no safeguard. In half precision torchdeq computes in float32
    and ``f`` in the dtype of the state. If torchdeq meets a singular system, it restarts from the best
    points, and samples that do not improve end as STALLED.

    https://github.com/locuslab/torchdeq

    Args:
        name: "anderson", "broyden", "fixed_point_iter", "simple_fixed_point_iter" or a registered name.
        options: options of the solver, for example ``{"m": 5, "lam": 1e-8}``; unknown names raise.
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
            raise ValueError(f"name must be a solver of torchdeq, got {self.name!r}") from error

    def run(
        self,
        problem: Problem,
        start: Tensor,
        tolerance: Tolerance,
        max_steps: int,
        states_at: Sequence[int],
    ) -> Solution:
        if torch.is_grad_enabled():
            raise RuntimeError("torchdeq's solvers cannot be unrolled here; use adjoint=Implicit()")
        monitored = _MonitoredMap(problem, start, tolerance, max_steps, states_at)
        solve, wide = get_solver(self.name), small_dtype(start.dtype)
        begin, before = start, torch.full_like(monitored.best.relative, torch.inf)
        while True:
            try:
                # The monitored map decides when to stop, so torchdeq's own limit is larger.
                solve(
                    monitored,
                    begin.to(wide),
                    max_iter=max_steps + 3,
                    tol=0.0,
                    stop_mode="rel",
                    **self.options,
                )
            except _Finished:
                break
            except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
                # These samples cannot continue because of a singular system.
                best, status = monitored.best, monitored.status
                stalled = (status == RUNNING) & ~(best.relative < before)
                monitored.status = torch.where(stalled, int(Status.STALLED), status)
                begin, before = best.value, best.relative
            else:
                break
        return monitored.solution()


class _Finished(Exception):
    """Ends the run of a torchdeq solver."""


class _MonitoredMap:
    """Map for torchdeq that records the best iterate and the cost of every sample."""

    def __init__(
        self,
        problem: Problem,
        start: Tensor,
        tolerance: Tolerance,
        max_steps: int,
        states_at: Sequence[int],
    ) -> None:
        self.problem, self.tolerance, self.max_steps = problem, tolerance, max_steps
        self.start, self.snapshots = start, Snapshots(states_at)
        infinite = torch.full_like(row_norm(start), torch.inf)
        self.best = Best(start, infinite, infinite, None)
        self.status = torch.full_like(infinite, RUNNING, dtype=torch.int64)
        self.evaluations = torch.zeros_like(self.status)
        self.finite = self.status == RUNNING  # whether the latest point is finite
        self.count = 0

    def __call__(self, z: Tensor, tau: float = 1.0) -> Tensor:
        """Return ``(1 - tau) z + tau f(z)`` in the dtype of ``z``; f is evaluated in that of the state."""
        running = self.status == RUNNING
        if self.count == self.max_steps or not bool(running.any()):
            raise _Finished
        self.count += 1
        # torchdeq's z is a view of a buffer that it overwrites, so it is copied.
        own = z.to(self.start.dtype, copy=True)
        if self.problem.mask is not None:  # torchdeq's mixing rounds masked values
            own = torch.where(self.problem.mask, own, self.start)
        point = self.problem.exact(self.problem.evaluate(own))
        # An overflowed f(z) would make any residual look small.
        self.finite = point.finite()
        taken = running & self.finite
        relative, converged = point.judged(taken, self.tolerance)
        better = (taken & (relative < self.best.relative)) | converged
        self.best.update(better, point, relative)
        self.evaluations = torch.where(running, self.count, self.evaluations)
        self.status = torch.where(converged, int(Status.CONVERGED), self.status)
        self.snapshots.keep(self.best, self.count)
        return z + tau * point.residual.to(z.dtype)

    def solution(self) -> Solution:
        best, steps = self.best, self.evaluations
        ended = torch.where(self.finite, int(Status.MAX_STEPS), int(Status.DIVERGED))
        status = torch.where(self.status == RUNNING, ended, self.status)
        status = torch.where(torch.isfinite(best.relative), status, int(Status.NONFINITE))
        return Solution(
            value=best.value,
            status=status,
            residual=best.relative,
            residual_norm=best.norm,
            steps=steps,
            evaluations=steps,
            states=self.snapshots.states(best),
        )


def register(name: str, solver: Solver | None = None) -> None:
    """Register a solver of this package with torchdeq, as ``f_solver=name`` or ``b_solver=name``.

    torchdeq's ``tol`` and ``stop_mode`` set the :class:`Tolerance`, ``max_iter`` sets ``max_steps``. The
    statistics are torchdeq's, measured at the returned value, with a "status" and "evaluations" per sample
    in addition. ``indexing`` (torchdeq's ``n_states`` and ``indexing``) sets ``states_at`` and returns all
    states, even if the solve ends earlier. Unknown keyword arguments raise TypeError.
    """
    ours = Anderson() if solver is None else solver
    require_instance("solver", ours, Solver, "a solvers.Solver")

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
        at = require_increasing("indexing", indexing or (), high=max_iter, what="max_iter")
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
            states_at=at,
        )
        with torch.no_grad():
            statistics = solver_stat_from_final_step(
                solution.value, func(solution.value), int(solution.steps.max())
            )
        statistics["status"] = solution.status
        statistics["evaluations"] = solution.evaluations
        return solution.value, list(solution.states or [solution.value]), statistics

    register_solver(name, solve)

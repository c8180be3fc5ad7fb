"""Solvers of torchdeq in :func:`solvers.fixed_point`, and ours in torchdeq's registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from solvers.core.checks import require_instance
from solvers.core.loop import ExternalSolver, Options, Solver
from solvers.core.problem import Problem
from solvers.core.rows import RUNNING, Best, merge_rows, scaled_norm, small_dtype
from solvers.core.solution import Solution, Status
from solvers.core.tolerance import Tolerance
from solvers.fixed_points import fixed_point
from solvers.methods.anderson import Anderson

try:
    from torchdeq.solver import get_solver, register_solver, solver_stat_from_final_step
except ImportError as error:
    raise ImportError(
        f"solvers.torchdeq_bridge needs torchdeq, which could not be imported ({error}): "
        '`pip install ".[torchdeq]"` in a checkout of implicit-attn'
    ) from error

OPTIONS: dict[str, frozenset[str]] = {
    "anderson": frozenset({"m", "lam", "tau"}),
    "broyden": frozenset({"LBFGS_thres", "ls"}),
    "fixed_point_iter": frozenset({"tau"}),
    "simple_fixed_point_iter": frozenset({"tau"}),
}


@dataclass(frozen=True)
class TorchDEQ(ExternalSolver):
    """A solver of torchdeq's registry, stopped by the criterion of :func:`solvers.fixed_point`.

    Every evaluation of ``f`` is measured, and the best point of each sample is kept; there is no
    safeguard. Half precision is solved in float32, but ``f`` is evaluated in the dtype of the state.
    After a singular system torchdeq starts again from the best points, and samples that do not gain
    are STALLED. See https://github.com/locuslab/torchdeq.

    Args:
        name: "anderson", "broyden", "fixed_point_iter", "simple_fixed_point_iter" or a registered one.
        options: passed on, for example ``{"m": 5, "lam": 1e-8}``; unknown names raise.
    """

    name: str = "anderson"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = OPTIONS.get(self.name, self.options.keys())
        if unknown := sorted(set(self.options) - known):
            raise ValueError(f"options of {self.name} must be among {sorted(known)}, got {unknown}")
        try:
            get_solver(self.name)
        except AssertionError as error:
            raise ValueError(
                f"name must be a solver known to torchdeq, got {self.name!r}"
            ) from error

    def run(self, problem: Problem, start: Tensor, options: Options) -> Solution:
        if torch.is_grad_enabled():
            raise RuntimeError("torchdeq's solvers cannot be unrolled here; use adjoint=Implicit()")
        infinite = torch.full_like(scaled_norm(start), torch.inf)
        caps: Tensor | None = None
        best = Best(start, infinite, infinite, infinite, infinite, None)
        status = torch.full_like(infinite, RUNNING, dtype=torch.int64)
        evaluations, finite, count = torch.zeros_like(status), status == RUNNING, 0

        def monitored(z: Tensor, tau: float = 1.0) -> Tensor:
            """``(1 - tau) z + tau f(z)``, in the dtype of ``z``; f is measured in that of the state."""
            nonlocal best, status, evaluations, finite, count, caps
            running = status == RUNNING
            if count == options.max_steps or not bool(running.any()):
                raise _Finished
            count += 1
            # A copy, since torchdeq's z is a part of a buffer that it writes again.
            own = z.to(start.dtype, copy=True)
            if problem.mask is not None:  # torchdeq's mixing rounds numbers that should not change
                own = torch.where(problem.mask, own, start)
            point = problem.evaluate(own)
            finite = point.finite()  # an overflowed f(z) would make any residual look small
            rule = options.rule(problem, point)
            caps = rule.caps(point) if caps is None else caps
            # torchdeq tells nothing of an error: the residual alone decides.
            within = (point.norms <= rule.allowed(point, caps)).all(1)
            score, relative = rule.score(point, caps), point.relative()
            better = running & finite & ((score < best.score) | within)
            unknown = torch.full_like(score, torch.nan)
            own = Best(point.z, score, relative, point.norm, unknown, None)
            best, converged = merge_rows(better, own, best), running & finite & within
            evaluations = torch.where(running, count, evaluations)
            status = torch.where(converged, int(Status.CONVERGED), status)
            return z + tau * point.residual.to(z.dtype)

        before = infinite
        # More steps than the budget: the monitored map, not torchdeq, decides when to stop.
        given = {"max_iter": options.max_steps + 3, "tol": 0.0, "stop_mode": "rel", **self.options}
        while True:
            try:
                get_solver(self.name)(monitored, best.value.to(small_dtype(start.dtype)), **given)
                break
            except _Finished:
                break
            except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
                stalled = (status == RUNNING) & ~(best.relative < before)
                status, before = torch.where(stalled, int(Status.STALLED), status), best.relative
        ended = torch.where(finite, int(Status.MAX_STEPS), int(Status.DIVERGED))
        status = torch.where(status == RUNNING, ended, status)
        status = torch.where(torch.isfinite(best.relative), status, int(Status.NONFINITE))
        found = best.value, status, best.relative, best.norm, evaluations, evaluations
        return Solution(*found, error=best.error)


class _Finished(Exception):
    """Ends the run of a torchdeq solver."""


def register(name: str, solver: Solver | None = None) -> None:
    """Register one of our solvers with torchdeq, as ``f_solver=name`` or ``b_solver=name``.

    The statistics are torchdeq's, measured at the returned value, with our "status" and "evaluations"
    of each sample. ``indexing`` gives a state for each of its numbers, by a solve of its own.
    """
    ours = Anderson() if solver is None else solver
    require_instance("solver", ours, Solver, "a solvers.Solver")

    def solve(
        func: Callable[[Tensor], Tensor], x0: Tensor, max_iter: int = 50, tol: float = 1e-3,
        stop_mode: str = "abs", indexing: list[int] | None = None,
    ) -> tuple[Tensor, list[Tensor], dict[str, Any]]:  # fmt: skip
        if stop_mode not in ("abs", "rel"):
            raise ValueError(f'stop_mode must be "abs" or "rel", got {stop_mode!r}')
        tolerance = Tolerance(rtol=tol) if stop_mode == "rel" else Tolerance(rtol=0.0, atol=tol)

        def solution(most: int, on_failure: str = "warn") -> Solution:
            # torchdeq's functions close over the whole batch, so no sample may leave it.
            return fixed_point(
                func, x0, solver=ours, tolerance=tolerance, max_steps=most, adjoint=None,
                compact=False, on_failure=on_failure,
            )  # fmt: skip

        found = solution(max_iter)
        value, steps = found.value, int(found.steps.max())
        states = [solution(number, "ignore").value for number in indexing or ()]
        with torch.no_grad():
            statistics = solver_stat_from_final_step(value, func(value), steps)
        statistics |= {"status": found.status, "evaluations": found.evaluations}
        return value, states or [value], statistics

    register_solver(name, solve)

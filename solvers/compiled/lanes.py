"""A few turns of a solve as a function of tensors; see :mod:`solvers.compiled.forward`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from solvers.core.arrays import small_dtype
from solvers.core.guards.growth import FAR
from solvers.core.loop import DIVERGENCE, PATIENCE
from solvers.core.problem import Problem
from solvers.core.rows import RUNNING, Best, Point, merge_rows, where_rows
from solvers.core.safeguard import MAX_REJECTIONS, Backtracking, acceptable
from solvers.core.solution import Status
from solvers.core.solver import Solver, Turn
from solvers.core.tolerance import Tolerance
from solvers.methods.turns import LEFT


@dataclass
class Numbers:
    """What a solve is to reach, as tensors, so that a program serves for all values."""

    rtol: Tensor  # () or (B,)
    atol: Tensor
    max_steps: Tensor  # () int64

    @classmethod
    def of(cls, tolerance: Tolerance, max_steps: int, like: Tensor) -> Numbers:
        """Those of a call, on the device of ``like``."""
        wide = small_dtype(like.dtype)
        rtol, atol = (
            torch.as_tensor(part, dtype=wide, device=like.device)
            for part in (tolerance.rtol, tolerance.atol)
        )
        return cls(rtol, atol, torch.tensor(max_steps, device=like.device))


@dataclass
class Lanes:
    """A solve after some evaluation; tensors have one row a sample, none ever leaves."""

    trial: Tensor  # (B, D) to be evaluated next
    current: Point | None  # the last accepted point; None before the first evaluation
    best: Best
    status: Tensor  # (B,) RUNNING, LEFT or a solvers.Status
    evaluations: Tensor  # (B,)
    rejected: Tensor  # (B,) trials that were not accepted
    count: Tensor  # () evaluations of a running row
    limit: Tensor  # (B,) residual norm beyond which a sample is left
    scale: Tensor  # (B,) of the first evaluation
    milestone: Tensor  # (B,) best relative residual when it was last asked whether samples stall
    state: Any  # the solver's
    backtracking: Backtracking


def begin(start: Tensor, problem: Problem) -> tuple[Lanes, Point]:
    """The first evaluation, at ``start`` (B, D); nothing is judged yet."""
    point = problem.evaluate(start)
    whole = torch.zeros_like(point.norm, dtype=torch.int64)
    infinite = torch.full_like(point.norm, torch.inf)
    energy = None if point.energy is None else torch.full_like(point.energy, torch.nan)
    scale = torch.maximum(point.norm, point.reference)
    lanes = Lanes(
        trial=start,
        current=None,
        best=Best(start, infinite, infinite, energy),
        status=whole + RUNNING,
        evaluations=whole,
        rejected=whole,
        count=torch.zeros((), dtype=torch.int64, device=start.device),
        limit=DIVERGENCE * scale,
        scale=scale,
        milestone=infinite,
        state=None,
        backtracking=Backtracking.start(point.norm),
    )
    return lanes, point


def turn(lanes: Lanes, point: Point, problem: Problem, solver: Solver, numbers: Numbers) -> Lanes:
    """Judge the evaluated ``point`` of every running row and let the solver propose its next trial.

    As :class:`solvers.core.loop.Loop`, but a row that leaves the ordinary way is marked LEFT.
    """
    running = lanes.status == RUNNING
    count = lanes.count + 1
    accepted, left = _judge(lanes, point, problem)
    taken = running & ~left if accepted is None else running & accepted & ~left
    relative = point.relative().clamp_max(torch.finfo(point.norm.dtype).max)
    threshold = torch.maximum(point.reference * numbers.rtol, numbers.atol)
    converged = taken & (point.norm <= threshold.to(point.norm.dtype))
    best = _better(
        lanes.best, (taken & (relative < lanes.best.relative)) | converged, point, relative
    )
    evaluations = torch.where(running, count, lanes.evaluations)
    status = torch.where(running & left, LEFT, lanes.status)
    status = torch.where(converged, int(Status.CONVERGED), status)
    over = (status == RUNNING) & (evaluations >= numbers.max_steps)
    status = torch.where(over, int(Status.MAX_STEPS), status)
    due = count % PATIENCE == 0
    stuck = due & (best.relative > 0.99 * lanes.milestone) & (status == RUNNING)
    status = torch.where(stuck, LEFT, status)
    rejected = lanes.rejected
    current, backtracking = point, lanes.backtracking
    if accepted is not None:
        rejected = rejected + (running & ~accepted)
        backtracking = replace(backtracking)
        if lanes.current is not None:
            current = merge_rows(accepted, point, lanes.current)
            backtracking.note(accepted)
    state = solver.init(current, problem) if lanes.current is None else lanes.state
    rejections = backtracking.rejections
    told = None if lanes.current is None else accepted
    candidate = solver.step(state, Turn(current, point, told, rejections, problem, 0))
    if told is not None and not solver.searches:
        candidate = where_rows(told, candidate, backtracking.step(current, point))
    return replace(
        lanes,
        trial=where_rows(status == RUNNING, candidate, lanes.trial),
        current=current,
        best=best,
        status=status,
        evaluations=evaluations,
        rejected=rejected,
        count=count,
        milestone=torch.where(due, best.relative, lanes.milestone),
        state=state,
        backtracking=backtracking,
    )


def _judge(lanes: Lanes, point: Point, problem: Problem) -> tuple[Tensor | None, Tensor]:
    """Rows that accept the point (None: all that are not left), and rows to be left, (B,) bool.

    Without an energy a step is rejected only where something is wrong.
    """
    if not problem.has_energy:
        fine = point.finite()
        return None, ~(fine & (point.norm <= lanes.limit))
    accepted = acceptable(point, lanes.current, lanes.limit)
    hopeless = ~accepted & (lanes.backtracking.rejections >= MAX_REJECTIONS)
    if lanes.current is None:
        hopeless = ~accepted
    # Where the state has grown far the ordinary loop looks at the energy's fall, too.
    return accepted, hopeless | (point.reference > FAR * lanes.scale)


def _better(best: Best, better: Tensor, point: Point, relative: Tensor) -> Best:
    energy = best.energy
    if energy is not None and point.energy is not None:
        energy = torch.where(better, point.energy, energy)
    return Best(
        where_rows(better, point.z, best.value),
        torch.where(better, relative, best.relative),
        torch.where(better, point.norm, best.norm),
        energy,
    )

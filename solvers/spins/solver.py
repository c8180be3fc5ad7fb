"""The solver of the adaptive TAP equations: Anderson acceleration with automatic damping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from solvers.core.checks import require_count, require_number
from solvers.core.device import maybe_any
from solvers.core.problem import Problem
from solvers.core.rows import Point, where_rows
from solvers.core.solution import Status
from solvers.core.solver import Solver, Turn
from solvers.methods.anderson import Anderson, AndersonState, TracedAndersonState

GROWTH = 3.0  # of the residual over its best, beyond which a step is damped
SMALLEST = 0.125  # damping factor


@dataclass(frozen=True)
class AdaptiveTAP(Solver):
    """Anderson acceleration for the adaptive TAP equations, damped where the residual grows.

    A trial at which the response ``chi`` is not positive definite is rejected, and its step halved
    until ``chi`` is. Where the residual has grown to three times its best, or a trial was rejected,
    the sample drops its Anderson history and makes a damped step ``z + t (f(z) - z)``. Its ``t`` is
    halved each time that happens, down to 1/8, and grows by a fifth in every other step. A sample
    that finds no positive definite ``chi`` ends as ``Status.INDEFINITE``.

    :func:`solvers.adaptive_tap` uses it, and so does a layer:
    ``DEQ(AdaptiveTAPAttention(...), solver=AdaptiveTAP())``.

    Args:
        damping: None: as above; a number in (0, 1]: damped steps with this ``t`` alone.
        memory: number of earlier iterates that Anderson acceleration uses, >= 1.
    """

    damping: float | None = None
    memory: int = 6

    lost: ClassVar[Status] = Status.INDEFINITE

    def __post_init__(self) -> None:
        if self.damping is not None:
            require_number("damping", self.damping, low=0.0, high=1.0, closed=False)
        require_count("memory", self.memory)

    def init(self, point: Point, problem: Problem) -> TAPState:
        anderson = Anderson(memory=self.memory)
        return TAPState(
            accelerated=anderson.init(point, problem) if self.damping is None else None,
            damping=torch.ones_like(point.norm),
            best=torch.full_like(point.norm, torch.inf),
        )

    def step(self, state: TAPState, turn: Turn) -> Tensor:
        current = turn.current
        if state.accelerated is None:
            return current.z.add(current.residual, alpha=self.damping or 1.0)
        candidate = Anderson(memory=self.memory).step(state.accelerated, turn)
        worse = current.norm > GROWTH * state.best
        if turn.accepted is not None:
            worse = worse | ~turn.accepted
        smaller = (state.damping / 2).clamp_min(SMALLEST)
        state.damping = torch.where(worse, smaller, (1.2 * state.damping).clamp_max(1.0))
        state.best = torch.where(worse, current.norm, torch.minimum(current.norm, state.best))
        if not maybe_any(worse):
            return candidate
        state.accelerated.forget(worse)
        damped = current.z + state.damping[:, None].to(current.z.dtype) * current.residual
        return where_rows(worse, damped, candidate)


@dataclass
class TAPState:
    """``damping`` (B,) of the next damped step, ``best`` (B,) residual norm of the current history."""

    accelerated: AndersonState | TracedAndersonState | None
    damping: Tensor
    best: Tensor

"""Adaptive TAP as a solver: accelerated steps that damp themselves where they make things worse."""

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
from solvers.methods.anderson import Anderson, AndersonState

GROWTH = 3.0  # of the residual over its best that counts as harm
SHORTEST = 0.125  # damping that harm may lead to


@dataclass(frozen=True)
class AdaptiveTAP(Solver):
    """Solver of the adaptive TAP equations, as ``DEQ(AdaptiveTAPAttention(...), solver=AdaptiveTAP())``.

    Anderson's steps, sample by sample. A trial at which the response is not positive definite is not
    taken: the step is halved until it is. Where the residual has grown to three times its best, or a
    trial was not taken, the sample forgets its history and makes a plain step ``z + t (f(z) - z)``;
    its ``t`` is halved each time that happens, down to 1/8, and recovers by a fifth a step.

    A sample that finds no positive definite point ends as ``Status.INDEFINITE``.

    Args:
        damping: None for the above; a number in (0, 1] for plain steps of that length alone.
        memory: of the acceleration, >= 1.

    :func:`solvers.adaptive_tap` solves given couplings and fields with it.
    """

    damping: float | None = None
    memory: int = 6

    lost: ClassVar[Status] = Status.INDEFINITE

    def __post_init__(self) -> None:
        if self.damping is not None:
            require_number("damping", self.damping, low=0.0, high=1.0, closed=False)
        require_count("memory", self.memory)

    def init(self, point: Point, problem: Problem) -> TAPState:
        accelerated = None
        if self.damping is None:
            accelerated = Anderson(memory=self.memory).init(point, problem)
        return TAPState(
            accelerated=accelerated,
            length=torch.ones_like(point.norm),
            best=torch.full_like(point.norm, torch.inf),
        )

    def step(self, state: TAPState, turn: Turn) -> Tensor:
        current = turn.current
        if state.accelerated is None or self.damping is not None:
            return current.z.add(current.residual, alpha=self.damping or 1.0)
        candidate = Anderson(memory=self.memory).step(state.accelerated, turn)
        harmed = current.norm > GROWTH * state.best
        if turn.accepted is not None:
            harmed = harmed | ~turn.accepted
        shorter = (state.length / 2).clamp_min(SHORTEST)
        state.length = torch.where(harmed, shorter, (1.2 * state.length).clamp_max(1.0))
        state.best = torch.where(harmed, current.norm, torch.minimum(current.norm, state.best))
        if not maybe_any(harmed):
            return candidate
        state.accelerated.forget(harmed)
        plain = current.z + state.length[:, None].to(current.z.dtype) * current.residual
        return where_rows(harmed, plain, candidate)


@dataclass
class TAPState:
    """``length`` (B,) of the plain step, ``best`` (B,) residual since the history was last forgotten."""

    accelerated: AndersonState | None
    length: Tensor
    best: Tensor

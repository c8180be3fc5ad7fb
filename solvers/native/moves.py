"""Evaluations of a solve that just goes on, each with the step after it in one call of C++."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.native.process import THREADS
from solvers.native.steps import Move, Ring, Steps

NORMS, MOVE, STEP = 0, 1, 2  # that may be wanted of a call, as ``steps.cpp`` knows
BLOCK = 8  # evaluations whose norms are allocated at once
Before = tuple[Tensor, Tensor]  # a point (B, D) and its residual, contiguous


@dataclass
class Moved:
    """What an evaluation at z (B, D) gave.

    ``residual`` (B, D), its norms (B,), those of the value, and their ratio; ``following`` (B, D) is where
    to evaluate next, None where the caller has to judge and to step.
    """

    residual: Tensor
    norm: Tensor
    reference: Tensor
    relative: Tensor
    following: Tensor | None


class Moves:
    """The evaluations of a working batch (B, D), as long as its rows stay the same.

    Args:
        ring: of the solver; how many differences it has made is told to each call.
        like: a tensor of the batch.
        limit: (B,) residual norms beyond which a sample is for the caller to judge.
        rtol: of the tolerance, () or (B,), in the dtype of the batch as all others.
        atol: of the tolerance, () or (B,).
        moderate: norms of values below it are for the caller to judge.
    """

    def __init__(
        self,
        steps: Steps,
        ring: Ring,
        like: Tensor,
        limit: Tensor,
        rtol: Tensor,
        atol: Tensor,
        moderate: float,
    ) -> None:
        batch, size = like.shape
        self._kept = limit, rtol, atol  # C++ has their addresses alone
        self._move = Move(
            ring, None, None, None, None, None, None, None, None,
            limit.data_ptr(), rtol.data_ptr(), atol.data_ptr(), None,
            THREADS.fork, THREADS.number, batch, size, 0, rtol.dim(), atol.dim(), moderate,
        )  # fmt: skip
        self._ring, self._at, self._function = (
            self._move.ring, ctypes.addressof(self._move), steps.move,
        )  # fmt: skip
        self._batch, self._row = batch, batch * like.element_size()
        self._numbers: list[Tensor] = []

    def take(
        self,
        z: Tensor,
        value: Tensor,
        before: Before | None,
        count: int,
        best: Tensor,
        status: Tensor | None,
    ) -> Moved:
        """Judge the ``value`` of the map at ``z`` (B, D), both contiguous, and go on from there.

        Args:
            before: the point before this one; None: only the norms are asked for.
            count: differences that the solver has made.
            best: (B,) smallest ratio of norms seen.
            status: (B,) int64, -1 where a sample runs; None: all run.
        """
        move, residual = self._move, torch.empty_like(z)
        if not self._numbers:
            self._numbers = list(z.new_empty(3 * BLOCK, self._batch).unbind())
        relative, reference, norm = (self._numbers.pop() for _ in range(3))
        move.z, move.value, move.residual = z.data_ptr(), value.data_ptr(), residual.data_ptr()
        start, row = norm.data_ptr(), self._row  # the last of three in a row is popped first
        move.norm, move.reference, move.relative = start, start + row, start + 2 * row
        if before is None:
            move.wanted = NORMS
            self._function(self._at)
            return Moved(residual, norm, reference, relative, None)
        following = torch.empty_like(z)
        move.wanted, move.next, move.best_relative = MOVE, following.data_ptr(), best.data_ptr()
        move.status = None if status is None else status.data_ptr()
        self._after(before, count)
        made = self._function(self._at)
        return Moved(residual, norm, reference, relative, following if made else None)

    def step(self, z: Tensor, residual: Tensor, before: Before | None, count: int) -> Tensor:
        """Where to evaluate after ``z`` (B, D) with its ``residual``; ``before`` None: this is the first."""
        move, following = self._move, torch.empty_like(z)
        move.z, move.residual, move.next = z.data_ptr(), residual.data_ptr(), following.data_ptr()
        move.wanted = STEP
        self._after(before, count)
        self._function(self._at)
        return following

    def _after(self, before: Before | None, count: int) -> None:
        ring = self._ring
        if before is None:
            ring.z = ring.residual = None
        else:
            ring.z, ring.residual, ring.count = before[0].data_ptr(), before[1].data_ptr(), count

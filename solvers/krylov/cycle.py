"""What a linear solve keeps: the state of each sample, the results of a cycle, the trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.core.arrays import Array, Arrays
from solvers.core.rows import Progress
from solvers.core.solution import Status, Trace
from solvers.krylov.method import KrylovRun
from solvers.krylov.product import System


class SampleState:
    """Where each sample stands, from the start ``x = 0``.

    Attributes:
        x: (B, D) best iterate.
        r: (B, D) ``b - A x`` of the samples that are open.
        residual: (B, 1) array, the norm of the residual at ``x``.
        target: (B, 1) array, the residual norm that a cycle aims at.
        open: (B, 1) bool array, samples that are still being solved.
        status: (B, 1) int64 array of :class:`solvers.Status`.
        steps: (B, 1) int64 array, steps of the Krylov method.
        evaluations: (B, 1) int64 array, products with ``A``.
    """

    def __init__(self, system: System) -> None:
        self.arrays = system.arrays
        self.x = torch.zeros_like(system.b)
        self.r, self.residual, self.target = system.b, system.reference, system.limit
        self.open = system.finite & (system.reference > 0)
        self.steps = self.evaluations = self.arrays.whole(self.open)
        self.status = self.steps + int(Status.MAX_STEPS)

    def move(self, rows: Array, x: Tensor, r: Tensor, residual: Array) -> None:
        """In ``rows`` (B, 1) the point ``x`` with the residual ``r`` becomes the best iterate."""
        self.x = self.arrays.choose(rows, x, self.x)
        self.r = self.arrays.choose(rows, r, self.r)
        self.residual = self.arrays.xp.where(rows, residual, self.residual)

    def close(self, rows: Array, status: Status | Array) -> None:
        """End the samples ``rows`` (B, 1) with ``status``."""
        self.status = self.arrays.xp.where(rows, status, self.status)
        self.open = self.open & ~rows


@dataclass
class CycleResult:
    """What one cycle of the Krylov method found, sample by sample in the caller's order."""

    correction: Tensor  # (B, D), to be added to x
    residual: Array  # (B, 1), as are the others; see the methods of KrylovRun
    verdict: Array
    used: Array
    matrix_norm: Array
    reliable: Array

    @classmethod
    def of(cls, run: KrylovRun) -> CycleResult:
        return cls(
            run.solution(),
            run.residual(),
            run.verdict(),
            run.used,
            run.matrix_norm,
            run.reliable(),
        )

    @classmethod
    def idle(cls, state: SampleState) -> CycleResult:
        """The result of a cycle that took no step."""
        arrays = state.arrays
        zero = arrays.xp.zeros_like(state.residual)
        none = arrays.whole(zero)
        verdict = none + int(Status.MAX_STEPS)
        correction, residual = torch.zeros_like(state.x), arrays.copy(state.residual)
        return cls(correction, residual, verdict, none, zero, none == 0)

    def put(self, part: CycleResult, rows: Array, arrays: Arrays) -> None:
        """Write ``part`` into the samples ``rows``."""
        self.correction.index_copy_(0, arrays.write(rows), part.correction)
        for name in ("residual", "verdict", "used", "matrix_norm", "reliable"):
            getattr(self, name)[rows] = getattr(part, name)


@dataclass
class WorkingBatch:
    """The samples that take part in a cycle; those that have stopped may leave it.

    Attributes:
        run: the Krylov method on them.
        rows: (n,) array, their places in the caller's batch.
        running: how many of them are known to run.
        left: results of those that have left, None before the first has.
    """

    run: KrylovRun
    rows: Array
    running: int
    left: CycleResult | None = None


class ResidualTrace:
    """Relative residuals after every product, for :class:`solvers.Trace` and the callback."""

    def __init__(
        self, system: System, record: bool, callback: Callable[[Progress], object] | None
    ) -> None:
        self.system, self.record, self.callback = system, record, callback
        self.wanted = record or callback is not None
        self.columns: list[Tensor] = []
        self.products = 0

    def start(self, residual: Array) -> None:
        """The residual norms (B, 1) before the first cycle."""
        if self.record:
            self.columns.append(self.system.relative(residual))

    def note(self, rows: Array, running: Array, residual: Array) -> None:
        """One product: residual norms (n, 1) of the samples ``rows``, where ``running`` (n, 1)."""
        arrays = self.system.arrays
        norms = arrays.xp.full_like(self.system.reference, torch.nan)
        norms[rows] = arrays.xp.where(running, residual, torch.nan)
        column = self.system.relative(norms)
        self.products += 1
        if self.record:
            self.columns.append(column)
        if self.callback is not None:
            self.callback(Progress(self.products, column, None, arrays.count(running)))

    def trace(self) -> Trace | None:
        return Trace(torch.stack(self.columns, dim=1)) if self.record else None

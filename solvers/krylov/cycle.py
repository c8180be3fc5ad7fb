"""What a linear solve keeps: the state of each sample, a cycle and its results, the trace."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from solvers.core.arrays import Array
from solvers.core.rows import Progress
from solvers.core.solution import Status, Trace
from solvers.krylov.method import KrylovRun
from solvers.krylov.product import System


class SampleState:
    """Where each sample stands, from ``x = 0`` on; :class:`LinearLoop` alone changes it.

    Attributes:
        x: (B, D) best iterate.
        r: (B, D) ``b - A x`` of the samples that are open.
        residual_norm: (B, 1) array, norm of the residual at ``x``.
        target: (B, 1) array, the residual norm that a cycle aims at.
        open: (B, 1) bool array, samples that are still being solved.
        status: (B, 1) int64 array of :class:`solvers.Status`.
        steps: (B, 1) int64 array, steps of the Krylov method.
        evaluations: (B, 1) int64 array, products with ``A``.
    """

    def __init__(self, system: System) -> None:
        self.arrays = system.arrays
        self.x = torch.zeros_like(system.b)
        self.r, self.residual_norm, self.target = system.b, system.reference, system.limit
        self.open = system.finite & (system.reference > 0)
        self.steps = self.evaluations = self.arrays.whole(self.open)
        self.status = self.steps + int(Status.MAX_STEPS)

    def move(self, rows: Array, x: Tensor, r: Tensor, r_norm: Array) -> None:
        """In ``rows`` (B, 1) the point ``x`` with the residual ``r`` becomes the best iterate."""
        self.x = self.arrays.choose(rows, x, self.x)
        self.r = self.arrays.choose(rows, r, self.r)
        self.residual_norm = self.arrays.xp.where(rows, r_norm, self.residual_norm)

    def close(self, rows: Array, status: Status | Array) -> None:
        """End the samples ``rows`` (B, 1) with ``status``."""
        self.status = self.arrays.xp.where(rows, status, self.status)
        self.open = self.open & ~rows


class Cycle:
    """One cycle of the Krylov method: its working batch, and the results of every sample.

    Samples that have stopped may leave the working batch; those that never entered it have a zero
    correction. The results, (B, 1) arrays but for ``correction``, are those of a finished cycle.

    Attributes:
        run: the Krylov method on the working batch.
        rows: (n,) array, places of the working batch in the caller's batch.
        running: how many samples of the working batch are known to run.
        correction: (B, D), to be added to ``x``.
        residual_norm, verdict, used, matrix_norm, reliable: see :class:`KrylovRun`.
    """

    def __init__(self, run: KrylovRun, rows: Array, state: SampleState) -> None:
        self.arrays, self.run, self.rows, self.running = state.arrays, run, rows, len(rows)
        self.correction = torch.zeros_like(state.x)
        self.residual_norm = self.arrays.copy(state.residual_norm)
        self.matrix_norm = self.arrays.xp.zeros_like(state.residual_norm)
        self.used = self.arrays.whole(state.residual_norm)
        self.verdict, self.reliable = self.used + int(Status.MAX_STEPS), self.used == 0

    def finish(self, run: KrylovRun, rows: Array) -> None:
        """Take the results of ``run`` for the samples ``rows`` (n,) of the caller's batch."""
        self.correction.index_copy_(0, self.arrays.write(rows), run.solution())
        self.residual_norm[rows], self.verdict[rows] = run.residual_norm, run.verdict()
        self.used[rows], self.matrix_norm[rows] = run.used, run.matrix_norm
        self.reliable[rows] = run.reliable()

    def shrink(self, running: Array) -> None:
        """Keep the samples ``running`` (n, 1) in the working batch, finish the others."""
        gone, stay = self.arrays.index(~running), self.arrays.index(running)
        self.finish(self.run.rows(gone), self.rows[gone])
        self.run, self.rows = self.run.rows(stay), self.rows[stay]


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

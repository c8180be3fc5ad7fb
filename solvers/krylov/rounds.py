"""What the loop over linear systems keeps: results of a round, residuals for the trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.core.arrays import Array, Arrays
from solvers.core.rows import Progress
from solvers.core.solution import Status, Trace
from solvers.krylov.method import KrylovRun


@dataclass
class Round:
    """What a round of the Krylov method says of each sample, in the caller's order."""

    step: Tensor  # (B, D) to be added to x
    residual: Array  # (B, 1), as are the others
    verdict: Array
    used: Array
    matrix_norm: Array
    reliable: Array

    @classmethod
    def of(cls, run: KrylovRun) -> Round:
        return cls(
            run.solution(),
            run.residual(),
            run.verdict(),
            run.used,
            run.matrix_norm,
            run.reliable(),
        )

    @classmethod
    def nothing(cls, arrays: Arrays, x: Tensor, residual: Array) -> Round:
        """The round in which no sample does anything: ``x`` (B, D), ``residual`` (B, 1)."""
        zero = arrays.xp.zeros_like(residual)
        none = arrays.whole(zero)
        verdict = none + int(Status.MAX_STEPS)
        return cls(torch.zeros_like(x), arrays.copy(residual), verdict, none, zero, none == 0)

    def put(self, part: Round, rows: Array, arrays: Arrays) -> None:
        """Write ``part`` into the samples ``rows``."""
        self.step.index_copy_(0, arrays.write(rows), part.step)
        for name in ("residual", "verdict", "used", "matrix_norm", "reliable"):
            getattr(self, name)[rows] = getattr(part, name)


@dataclass
class Working:
    """The samples of a round that still take part.

    Attributes:
        run: the Krylov method on them.
        rows: (n,) their places in the caller's order.
        running: how many of them are known to run.
        outcome: results of those that have left, None before the first has.
    """

    run: KrylovRun
    rows: Array
    running: int
    outcome: Round | None = None


class History:
    """Residuals per sample, for the trace and the callback."""

    def __init__(
        self,
        arrays: Arrays,
        reference: Array,
        record: bool,
        callback: Callable[[Progress], object] | None,
    ) -> None:
        self.arrays, self.reference = arrays, reference
        self.record, self.callback = record, callback
        self.wanted = record or callback is not None
        self.columns: list[Tensor] = []
        self.products = 0

    def start(self, residual: Array) -> None:
        if self.record:
            self.columns.append(self._relative(residual))

    def note(self, rows: Array, running: Array, residual: Array) -> None:
        """One product: residual norms (n, 1) of the samples ``rows``, where ``running`` (n, 1)."""
        norms = self.arrays.xp.full_like(self.reference, torch.nan)
        norms[rows] = self.arrays.xp.where(running, residual, torch.nan)
        column = self._relative(norms)
        self.products += 1
        if self.record:
            self.columns.append(column)
        if self.callback is not None:
            left = self.arrays.count(running)
            self.callback(Progress(self.products, column, None, left))

    def _relative(self, norms: Array) -> Tensor:
        return self.arrays.write(self.arrays.ratio(norms, self.reference).reshape(-1))

    def trace(self) -> Trace | None:
        return Trace(torch.stack(self.columns, dim=1)) if self.record else None

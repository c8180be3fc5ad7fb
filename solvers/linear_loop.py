"""The loop behind :func:`solvers.solve_linear`: rounds of a Krylov method, each judged honestly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from solvers.krylov import KrylovRun, LinearSolver, norm
from solvers.loop import SHRINK, Progress
from solvers.product import Product
from solvers.small import Array, Small
from solvers.solution import Solution, Status, Trace
from solvers.tolerance import Tolerance
from solvers.watch import Watch

# The residual of a recurrence is believed where DRIFT eps (|A| |x| + |b|), ten times what rounding
# was seen to do to it, is below the residual or the tolerance.
DRIFT = 40.0
# A round that was to converge and did not even halve the true residual has met rounding.
HALVED = 0.5


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

    def put(self, part: Round, rows: Array, small: Small) -> None:
        """Write ``part`` into the samples ``rows``."""
        self.step.index_copy_(0, small.write(rows), part.step)
        for name in ("residual", "verdict", "used", "matrix_norm", "reliable"):
            getattr(self, name)[rows] = getattr(part, name)


class History:
    """Residuals per sample, for the trace and the callback."""

    def __init__(
        self,
        small: Small,
        reference: Array,
        record: bool,
        callback: Callable[[Progress], object] | None,
    ) -> None:
        self.small, self.record, self.callback = small, record, callback
        self.reference = small.write(reference)
        self.wanted = record or callback is not None
        self.columns: list[Tensor] = []
        self.products = 0

    def start(self, residual: Array) -> None:
        if self.record:
            self.columns.append(relative_norm(self.small.write(residual), self.reference))

    def note(self, rows: Array, running: Array, residual: Array) -> None:
        """One product: residual norms (n, 1) of the samples ``rows``, where ``running`` (n, 1)."""
        write = self.small.write
        norms = torch.full_like(self.reference, torch.nan)
        known = torch.where(write(running), write(residual), torch.nan)
        column = relative_norm(norms.index_copy(0, write(rows), known), self.reference)
        self.products += 1
        if self.record:
            self.columns.append(column)
        if self.callback is not None:
            residuals, left = column.squeeze(1), self.small.count(running)
            self.callback(Progress(self.products, residuals, None, left))

    def trace(self) -> Trace | None:
        return Trace(torch.cat(self.columns, dim=1)) if self.record else None


def relative_norm(norms: Tensor, reference: Tensor) -> Tensor:
    """``norms / reference``, 0 where both are 0."""
    return torch.where(norms == 0, norms, norms / reference)


class LinearLoop:
    """One solve, in units in which ``b`` is of magnitude one (an exact rescaling of each sample).

    A round runs the Krylov method on ``A d = r`` for the samples that are still open, in lockstep,
    until each has converged by its recurrence, has broken down, or may spend no more. Then each
    sample is closed, or its true residual is computed by one more product and it is closed or sent
    into the next round. For GMRES a round is a cycle.
    """

    def __init__(
        self,
        product: Product,
        solver: LinearSolver,
        tolerance: Tolerance,
        max_steps: int,
        *,
        compact: bool = True,
        record: bool = False,
        callback: Callable[[Progress], object] | None = None,
    ) -> None:
        self.product, self.solver, self.tolerance = product, solver, tolerance
        self.max_steps, self.compact = max_steps, compact
        self.record, self.callback = record, callback

    def run(self, b: Tensor, x0: Tensor | None) -> Solution:
        """Solve for the rows of ``b`` (B, D); the solution's value is a matrix (B, D)."""
        self.small = Small(b.device)
        with numpy.errstate(all="ignore"):
            self._prepare(b)
            self._begin(x0)
        while True:
            rows = self.small.index(self.open)
            if len(rows) == 0:
                break
            outcome = self._round(rows)
            with numpy.errstate(all="ignore"):
                self._judge(outcome)
        return self._solution(b.dtype)

    def _prepare(self, b: Tensor) -> None:
        """Scale every row by a power of two, which rounds nothing; norms and limits."""
        small = self.small
        vectors = b.to(self.product.dtype)
        largest = small.read(vectors.abs().amax(1, keepdim=True))
        self.usable = largest < small.xp.inf
        exponent = small.xp.frexp(small.xp.where(self.usable, largest, 1))[1].clip(-100, 100)
        self.scale = small.xp.ldexp(largest * 0 + 1, exponent)
        self.factor = small.write(self.scale)
        self.b = vectors / self.factor
        if not small.host or not self.usable.all():
            self.b = torch.where(small.write(self.usable), self.b, 0)
        self.reference = small.read(norm(self.b))
        reference = small.write(self.reference * self.scale).squeeze(1)
        self.limit = small.read(self.tolerance.threshold(reference).unsqueeze(1)) / self.scale
        self.all_rows = small.range(b.shape[0])

    def _begin(self, x0: Tensor | None) -> None:
        """Close the samples that need no work; residuals of the others."""
        where = self.small.xp.where
        self.x = torch.zeros_like(self.b)
        self.r, self.residual = self.b, self.reference
        self.open = self.usable & (self.reference > 0)
        self.used = self.open * 0
        self.evaluations = self.used
        self.status = self.used + int(Status.MAX_STEPS)
        if x0 is not None:
            self._start_at(x0.to(self.b.dtype) / self.factor)
        self._close(~self.usable, Status.NONFINITE)
        self.residual = where(self.usable, self.residual, torch.inf)
        self._close(self.residual <= self.limit, Status.CONVERGED)
        self.history = History(self.small, self.reference, self.record, self.callback)
        self.history.start(self.residual)

    def _start_at(self, x: Tensor) -> None:
        small = self.small
        rows = small.index(self.open)
        if len(rows) == 0:
            return
        finite = small.read(torch.isfinite(x).all(1, keepdim=True))
        x = torch.where(small.write(self.open & finite), x, 0)
        r = self._true_residual(x, rows)
        length = small.read(norm(r))
        good = finite & (length < torch.inf)
        self.evaluations = self.evaluations + self.open
        moved = self.open & good
        self._close(self.open & ~good, Status.NONFINITE)
        self._move(moved, x, r, length)

    def _move(self, rows: Array, x: Tensor, r: Tensor, length: Array) -> None:
        """In ``rows`` (B, 1) the point ``x`` with residual ``r`` becomes the current one."""
        self.x = self.small.choose(rows, x, self.x)
        self.r = self.small.choose(rows, r, self.r)
        self.residual = self.small.xp.where(rows, length, self.residual)

    def _close(self, rows: Array, status: Status | Array) -> None:
        self.status = self.small.xp.where(rows, status, self.status)
        self.open = self.open & ~rows

    def _true_residual(self, x: Tensor, rows: Array) -> Tensor:
        """``b - A x`` (B, D), by one product for the samples ``rows``; ``b`` elsewhere."""
        sent = x * self.factor
        if not self.compact or len(rows) == len(self.all_rows):
            self.product.select(self.small.write(self.all_rows))
            return self.b - self.product.exact(sent) / self.factor
        index = self.small.write(rows)
        self.product.select(index)
        image = self.product.exact(sent.index_select(0, index))
        return self.b.index_add(0, index, image / self.factor.index_select(0, index), alpha=-1)

    def _round(self, rows: Array) -> Round:
        """Run the Krylov method until every sample of ``rows`` has stopped."""
        small, write = self.small, self.small.write
        budget = self.max_steps - self.evaluations
        caps = set(budget[rows].flatten().tolist())
        if not self.compact:
            rows = self.all_rows
        index = write(rows)
        self.product.select(index)
        whole = len(rows) == len(self.all_rows)
        r = self.r if whole else self.r.index_select(0, index)
        run = self.solver.start(r, write(self.limit[rows]), write(self.open[rows]))
        watch, running = Watch(self.b.device), len(rows)
        outcome: Round | None = None
        for step in range(max(caps)):
            if step + 1 in caps:
                self._reserve(run, rows, budget[rows] == step + 1)
            if step in caps:
                run.stop(write(budget[rows] == step))
            active = run.running
            run.absorb(self.product(run.direction))
            if self.history.wanted:
                self.history.note(rows, active, run.current())
            if run.exhausted:
                break
            mask = run.running if small.host else watch(run.running)
            left = running if mask is None else small.count(mask)
            if left == 0:
                break
            if left == running or mask is None:
                continue
            running = left
            if not self.compact or (len(rows) - left) * SHRINK < len(rows):
                run.quiet()
                continue
            outcome = outcome or self._nothing()
            run, rows = self._shrink(run, rows, mask, outcome)
            watch.reset()
        if outcome is None and whole:
            return Round.of(run)
        outcome = outcome or self._nothing()
        outcome.put(Round.of(run), rows, small)
        return outcome

    def _nothing(self) -> Round:
        """The round in which no sample does anything."""
        none, zero = self.used * 0, self.residual * 0
        return Round(
            torch.zeros_like(self.x),
            self.residual + zero,
            none + int(Status.MAX_STEPS),
            none,
            zero,
            none == 0,
        )

    def _shrink(
        self, run: KrylovRun, rows: Array, mask: Array, outcome: Round
    ) -> tuple[KrylovRun, Array]:
        """Let the rows leave where the host's ``mask`` is False; their results are kept."""
        gone, stay = self.small.index(~mask), self.small.index(mask)
        outcome.put(Round.of(run.rows(gone)), rows[gone], self.small)
        rows = rows[stay]
        self.product.select(self.small.write(rows))
        return run.rows(stay), rows

    def _reserve(self, run: KrylovRun, rows: Array, last: Array) -> None:
        """Before the last product: keep it for the check, where the check will be needed."""
        x = self.x.index_select(0, self.small.write(rows)) + run.solution()
        drift = self._drift(x, self.reference[rows], run.matrix_norm)
        believed = run.reliable() & (drift <= run.residual())
        run.stop(self.small.write(last & ~believed))

    def _drift(self, x: Tensor, reference: Array, matrix_norm: Array) -> Array:
        """Bound on what rounding has done to the residual of a recurrence, (n, 1)."""
        size = self.small.read(norm(x))
        return DRIFT * self.product.eps * (matrix_norm * size + reference)

    def _judge(self, outcome: Round) -> None:
        """Close the samples of a round, check those whose residual cannot be believed."""
        small = self.small
        self.used = self.used + outcome.used
        self.evaluations = self.evaluations + outcome.used
        x = self.x + outcome.step
        drift = self._drift(x, self.reference, outcome.matrix_norm)
        small_drift = drift <= small.xp.maximum(outcome.residual, self.limit)
        exact = outcome.residual == self.residual  # no step was taken
        believed = (outcome.reliable & small_drift) | exact
        spent = (self.evaluations >= self.max_steps) | (outcome.used == 0)
        finished = outcome.verdict != int(Status.MAX_STEPS)
        closing = self.open & (spent | (believed & finished))
        better = closing & (outcome.residual < self.residual)
        self.x = small.choose(better, x, self.x)
        self.residual = small.xp.where(better, outcome.residual, self.residual)
        self._close(closing, outcome.verdict)
        rows = small.index(self.open)
        if len(rows) > 0:
            self._check(outcome, x, rows)

    def _check(self, outcome: Round, x: Tensor, rows: Array) -> None:
        """True residuals of the samples still open at ``x``; who has gained nothing has stalled."""
        small = self.small
        x = self.product.rounded(x * self.factor) / self.factor
        checked = self.open
        r = self._true_residual(x, rows)
        length = small.read(norm(r))
        self.evaluations = self.evaluations + checked
        if self.history.wanted:
            self.history.note(self.all_rows, checked, length)
        claimed = outcome.verdict == int(Status.CONVERGED)
        creeping = 1 - torch.finfo(self.b.dtype).eps ** 0.5
        gained = length <= small.xp.where(claimed, HALVED, creeping) * self.residual
        self._move(checked & (length < self.residual), x, r, length)
        self._close(checked & (length <= self.limit), Status.CONVERGED)
        self._close(self.open & ~(length < torch.inf), Status.NONFINITE)
        broken = ~claimed & (outcome.verdict != int(Status.MAX_STEPS))
        self._close(self.open & broken, outcome.verdict)
        self._close(self.open & ~gained, Status.STALLED)
        self._close(self.open & (self.evaluations >= self.max_steps), Status.MAX_STEPS)

    def _solution(self, dtype: torch.dtype) -> Solution:
        write = self.small.write
        residual = write(self.residual)
        return Solution(
            value=(self.x * self.factor).to(dtype),
            status=write(self.status).squeeze(1),
            residual=relative_norm(residual, write(self.reference)).squeeze(1),
            residual_norm=(residual * self.factor).squeeze(1),
            steps=write(self.used).squeeze(1),
            evaluations=write(self.evaluations).squeeze(1),
            trace=self.history.trace(),
        )

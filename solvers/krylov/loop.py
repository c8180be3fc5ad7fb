"""The loop behind :func:`solvers.solve_linear`: rounds of a Krylov method, each judged honestly."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from solvers.core.arrays import Array, Arrays
from solvers.core.device import Watch
from solvers.core.loop import SHRINK
from solvers.core.rows import Progress
from solvers.core.solution import Solution, Status
from solvers.core.tolerance import Tolerance
from solvers.krylov.method import LinearSolver, norm
from solvers.krylov.product import Product
from solvers.krylov.rounds import History, Round, Working

# The residual of a recurrence is believed where DRIFT eps (|A| |x| + |b|), ten times what rounding
# was seen to do to it, is below the residual or the tolerance.
DRIFT = 40.0
# A round that was to converge and did not even halve the true residual has met rounding.
HALVED = 0.5
# Right-hand sides whose norms lie between 1 / MODERATE and MODERATE need no rescaling.
MODERATE = 1e6


class LinearLoop:
    """One solve, in units in which ``b`` is of moderate magnitude.

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
        self.arrays = Arrays(b.device)
        with numpy.errstate(all="ignore"):
            self._prepare(b)
            self._begin(x0)
        while True:
            rows = self.arrays.index(self.open)
            if len(rows) == 0:
                break
            outcome = self._round(rows)
            with numpy.errstate(all="ignore"):
                self._judge(outcome)
        return self._solution(b.dtype)

    def _prepare(self, b: Tensor) -> None:
        """Norms and limits; rows of extreme magnitude are scaled by a power of two."""
        arrays = self.arrays
        self.b = b.detach().to(self.product.dtype)
        self.reference = arrays.read(norm(self.b))
        self.usable = self.reference < torch.inf
        self.scale = arrays.xp.ones_like(self.reference)
        self.factor: Tensor | None = None
        moderate = (self.reference > 1 / MODERATE) & (self.reference < MODERATE)
        if not (arrays.host and moderate.all()):
            self._rescale()
        norms = arrays.write(self.reference * self.scale).squeeze(1)
        self.limit = arrays.read(self.tolerance.threshold(norms).unsqueeze(1)) / self.scale
        self.aim = self.limit
        self.all_rows = arrays.range(b.shape[0])

    def _rescale(self) -> None:
        """Bring every row to magnitude one, so that no square overflows or underflows."""
        arrays, xp = self.arrays, self.arrays.xp
        largest = arrays.read(self.b.abs().amax(1, keepdim=True))
        self.usable = largest < xp.inf
        exponent = xp.frexp(xp.where(self.usable, largest, 1))[1].clip(-100, 100)
        self.scale = xp.ldexp(xp.ones_like(largest), exponent)
        self.factor = arrays.write(self.scale)
        self.b = torch.where(arrays.write(self.usable), self.b / self.factor, 0)
        self.reference = arrays.read(norm(self.b))

    def _scaled(self, x: Tensor) -> Tensor:
        """From the caller's units to those of the loop."""
        return x if self.factor is None else x / self.factor

    def _unscaled(self, x: Tensor) -> Tensor:
        return x if self.factor is None else x * self.factor

    def _begin(self, x0: Tensor | None) -> None:
        """Close the samples that need no work; residuals of the others."""
        where = self.arrays.xp.where
        self.x = torch.zeros_like(self.b)
        self.r, self.residual = self.b, self.reference
        self.open = self.usable & (self.reference > 0)
        self.used = self.arrays.whole(self.open)
        self.evaluations = self.used
        self.status = self.used + int(Status.MAX_STEPS)
        if x0 is not None:
            self._start_at(self._scaled(x0.detach().to(self.b.dtype)))
        self._close(~self.usable, Status.NONFINITE)
        self.residual = where(self.usable, self.residual, torch.inf)
        self._close(self.residual <= self.limit, Status.CONVERGED)
        self.history = History(self.arrays, self.reference, self.record, self.callback)
        self.history.start(self.residual)

    def _start_at(self, x: Tensor) -> None:
        arrays = self.arrays
        rows = arrays.index(self.open)
        if len(rows) == 0:
            return
        finite = arrays.read(torch.isfinite(x).all(1, keepdim=True))
        x = torch.where(arrays.write(self.open & finite), x, 0)
        r = self._true_residual(x, rows)
        length = arrays.read(norm(r))
        good = finite & (length < torch.inf)
        self.evaluations = self.evaluations + self.open
        moved = self.open & good
        self._close(self.open & ~good, Status.NONFINITE)
        self._move(moved, x, r, length)

    def _move(self, rows: Array, x: Tensor, r: Tensor, length: Array) -> None:
        """In ``rows`` (B, 1) the point ``x`` with residual ``r`` becomes the current one."""
        self.x = self.arrays.choose(rows, x, self.x)
        self.r = self.arrays.choose(rows, r, self.r)
        self.residual = self.arrays.xp.where(rows, length, self.residual)

    def _close(self, rows: Array, status: Status | Array) -> None:
        self.status = self.arrays.xp.where(rows, status, self.status)
        self.open = self.open & ~rows

    def _true_residual(self, x: Tensor, rows: Array) -> Tensor:
        """``b - A x`` (B, D), by one product for the samples ``rows``; ``b`` elsewhere."""
        sent = self._unscaled(x)
        if not self.compact or len(rows) == len(self.all_rows):
            self.product.select(self.arrays.write(self.all_rows))
            return self.b - self._scaled(self.product.exact(sent))
        index = self.arrays.write(rows)
        self.product.select(index)
        image = torch.zeros_like(x)
        image.index_copy_(0, index, self.product.exact(sent.index_select(0, index)))
        return self.b - self._scaled(image)

    def _round(self, rows: Array) -> Round:
        """Run the Krylov method until every sample of ``rows`` has stopped."""
        budget = self.max_steps - self.evaluations
        caps = set(budget[rows].flatten().tolist())
        batch = self._start(rows)
        watch = Watch(self.b.device)
        for step in range(max(caps)):
            if step + 1 in caps:
                self._reserve(batch, budget[batch.rows] == step + 1)
            if step in caps:
                batch.run.stop(self.arrays.write(budget[batch.rows] == step))
            if not self._goes_on(batch, watch):
                break
            active = batch.run.running
            batch.run.absorb(self.product(batch.run.direction))
            if self.history.wanted:
                self.history.note(batch.rows, active, batch.run.current())
            if batch.run.exhausted:
                break
        if batch.outcome is None and len(batch.rows) == len(self.all_rows):
            return Round.of(batch.run)
        outcome = batch.outcome or Round.nothing(self.arrays, self.x, self.residual)
        outcome.put(Round.of(batch.run), batch.rows, self.arrays)
        return outcome

    def _start(self, rows: Array) -> Working:
        """The working batch of a round: ``rows``, or all samples where they must stay together."""
        write = self.arrays.write
        if not self.compact:
            rows = self.all_rows
        index = write(rows)
        self.product.select(index)
        whole = len(rows) == len(self.all_rows)
        r = self.r if whole else self.r.index_select(0, index)
        run = self.solver.start(r, write(self.aim[rows]), write(self.open[rows]))
        return Working(run, rows, len(rows))

    def _goes_on(self, batch: Working, watch: Watch) -> bool:
        """Whether any row of the batch still runs; stopped rows leave, or are put to rest."""
        arrays, run, rows = self.arrays, batch.run, batch.rows
        mask = run.running if arrays.host else watch(run.running)
        left = batch.running if mask is None else arrays.count(mask)
        if left == 0 or left == batch.running or mask is None:
            return left > 0
        batch.running = left
        if not self.compact or (len(rows) - left) * SHRINK < len(rows):
            run.quiet()
            return True
        if batch.outcome is None:
            batch.outcome = Round.nothing(arrays, self.x, self.residual)
        if not arrays.host:  # the watch's answer lies in pinned memory
            mask = mask.to(run.running.device)
        gone, stay = arrays.index(~mask), arrays.index(mask)
        batch.outcome.put(Round.of(run.rows(gone)), rows[gone], arrays)
        batch.run, batch.rows = run.rows(stay), rows[stay]
        self.product.select(arrays.write(batch.rows))
        watch.reset()
        return True

    def _reserve(self, batch: Working, last: Array) -> None:
        """Before the last product: keep it for the check, where the check will be needed."""
        run, rows = batch.run, batch.rows
        x = self.x.index_select(0, self.arrays.write(rows)) + run.solution()
        drift = self._drift(x, self.reference[rows], run.matrix_norm)
        believed = run.reliable() & (drift <= run.residual())
        run.stop(self.arrays.write(last & ~believed))

    def _drift(self, x: Tensor, reference: Array, matrix_norm: Array) -> Array:
        """Bound on what rounding has done to the residual of a recurrence, (n, 1)."""
        size = self.arrays.read(norm(x))
        return DRIFT * self.product.eps * (matrix_norm * size + reference)

    def _judge(self, outcome: Round) -> None:
        """Close the samples of a round, check those whose residual cannot be believed."""
        arrays = self.arrays
        self.used = self.used + outcome.used
        self.evaluations = self.evaluations + outcome.used
        x = self.x + outcome.step
        drift = self._drift(x, self.reference, outcome.matrix_norm)
        small_drift = drift <= arrays.xp.maximum(outcome.residual, self.limit)
        exact = outcome.residual == self.residual  # no step was taken
        believed = (outcome.reliable & small_drift) | exact
        spent = (self.evaluations >= self.max_steps) | (outcome.used == 0)
        finished = outcome.verdict != int(Status.MAX_STEPS)
        closing = self.open & (spent | (believed & finished))
        better = closing & (outcome.residual < self.residual)
        self.x = arrays.choose(better, x, self.x)
        self.residual = arrays.xp.where(better, outcome.residual, self.residual)
        # A claim to have converged that no product was left to check is no convergence.
        claimed = outcome.verdict == int(Status.CONVERGED)
        verdict = arrays.xp.where(claimed & ~believed, int(Status.MAX_STEPS), outcome.verdict)
        self._close(closing, verdict)
        rows = arrays.index(self.open)
        if len(rows) > 0:
            self._check(outcome, x, rows)

    def _check(self, outcome: Round, x: Tensor, rows: Array) -> None:
        """True residuals of the samples still open at ``x``; who has gained nothing has stalled."""
        arrays = self.arrays
        x = self._scaled(self.product.rounded(self._unscaled(x)))
        checked = self.open
        r = self._true_residual(x, rows)
        length = arrays.read(norm(r))
        self.evaluations = self.evaluations + checked
        if self.history.wanted:
            self.history.note(self.all_rows, checked, length)
        claimed = outcome.verdict == int(Status.CONVERGED)
        within = length <= self.limit
        creeping = 1 - torch.finfo(self.b.dtype).eps ** 0.5
        # An iterate that is no better by anything but rounding may be worse in every other way.
        better = within | (length < creeping * self.residual)
        gained = better & ((length <= HALVED * self.residual) | ~claimed)
        self._move(checked & better, x, r, length)
        # Whose recurrence said "converged" too early has to aim lower from now on.
        self.aim = arrays.xp.where(checked & claimed, HALVED * self.limit, self.aim)
        self._close(checked & within, Status.CONVERGED)
        self._close(self.open & ~(length < torch.inf), Status.NONFINITE)
        broken = ~claimed & (outcome.verdict != int(Status.MAX_STEPS))
        self._close(self.open & broken, outcome.verdict)
        self._close(self.open & ~gained, Status.STALLED)
        self._close(self.open & (self.evaluations >= self.max_steps), Status.MAX_STEPS)

    def _solution(self, dtype: torch.dtype) -> Solution:
        write = self.arrays.write
        return Solution(
            value=self._unscaled(self.x).to(dtype),
            status=write(self.status.reshape(-1)),
            residual=write(self.arrays.ratio(self.residual, self.reference).reshape(-1)),
            residual_norm=write((self.residual * self.scale).reshape(-1)),
            steps=write(self.used.reshape(-1)),
            evaluations=write(self.evaluations.reshape(-1)),
            trace=self.history.trace(),
        )

"""The loop behind :func:`solvers.solve_linear`: rounds of a Krylov method, each judged honestly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.krylov import KrylovRun, LinearSolver, choose, norm
from solvers.loop import SHRINK, Progress
from solvers.product import Product
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
    """What a round of the Krylov method says of each sample; all (B, ...), in the caller's order."""

    step: Tensor  # (B, D) to be added to x
    residual: Tensor  # (B, 1)
    verdict: Tensor
    products: Tensor
    matrix_norm: Tensor
    reliable: Tensor

    @classmethod
    def empty(cls, x: Tensor, residual: Tensor) -> Round:
        whole = torch.zeros_like(residual, dtype=torch.int64)
        return cls(
            step=torch.zeros_like(x),
            residual=residual,
            verdict=whole + int(Status.MAX_STEPS),
            products=whole,
            matrix_norm=torch.zeros_like(residual),
            reliable=torch.ones_like(residual, dtype=torch.bool),
        )

    def harvest(self, run: KrylovRun, rows: Tensor) -> None:
        """Take over the results of ``run``, whose rows are the samples ``rows``."""
        for name, value in (
            ("step", run.solution()),
            ("residual", run.residual()),
            ("verdict", run.verdict()),
            ("products", run.products),
            ("matrix_norm", run.matrix_norm),
            ("reliable", run.reliable()),
        ):
            whole = getattr(self, name)
            full = rows.numel() == whole.shape[0]
            setattr(self, name, value if full else whole.index_copy(0, rows, value))


class History:
    """Residuals per sample, for the trace and the callback."""

    def __init__(
        self,
        reference: Tensor,
        start: Tensor,
        record: bool,
        callback: Callable[[Progress], object] | None,
    ) -> None:
        self.reference, self.record, self.callback = reference, record, callback
        self.wanted = record or callback is not None
        self.columns = [self._relative(start)] if record else []
        self.products = 0

    def note(self, rows: Tensor, running: Tensor, residual: Tensor) -> None:
        """One product: residual norms (n, 1) of the samples ``rows``, where ``running`` (n, 1)."""
        if not self.wanted:
            return
        norms = torch.full_like(self.reference, torch.nan)
        norms.index_copy_(0, rows, torch.where(running, residual, torch.nan))
        self.products += 1
        column = self._relative(norms)
        if self.record:
            self.columns.append(column)
        if self.callback is not None:
            self.callback(Progress(self.products, column, None, int(running.sum())))

    def _relative(self, norms: Tensor) -> Tensor:
        return relative_norm(norms, self.reference).squeeze(1)

    def trace(self) -> Trace | None:
        return Trace(torch.stack(self.columns, dim=1)) if self.record else None


def relative_norm(norms: Tensor, reference: Tensor) -> Tensor:
    """``norms / reference``, 0 where both are 0."""
    return torch.where(norms == 0, 0.0, norms / reference)


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
        """Solve for the rows of ``b`` (B, D); the solution's value is a matrix in its dtype."""
        self._prepare(b)
        self._begin(x0)
        while True:
            rows = torch.nonzero(self.open.squeeze(1)).flatten()
            if rows.numel() == 0:
                break
            outcome = self._round(rows)
            self._judge(outcome, rows)
        relative = relative_norm(self.residual, self.reference)
        return Solution(
            value=(self.x * self.scale).to(b.dtype),
            status=self.status.squeeze(1),
            residual=relative.squeeze(1),
            residual_norm=(self.residual * self.scale).squeeze(1),
            steps=self.steps.squeeze(1),
            evaluations=self.evaluations.squeeze(1),
            trace=self.history.trace(),
        )

    def _prepare(self, b: Tensor) -> None:
        """Scale every row by a power of two, which rounds nothing; norms and limits."""
        vectors = b.to(self.product.dtype)
        largest = vectors.abs().amax(1, keepdim=True)
        self.usable = torch.isfinite(largest)
        _, exponent = torch.frexp(torch.where(self.usable, largest, 1))
        self.scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(-100, 100))
        self.b = torch.where(self.usable, vectors / self.scale, 0)
        self.reference = norm(self.b)
        limit = self.tolerance.threshold((self.reference * self.scale).squeeze(1)).unsqueeze(1)
        self.limit = limit / self.scale
        self.all_rows = torch.arange(b.shape[0], device=b.device)

    def _begin(self, x0: Tensor | None) -> None:
        """Close the samples that need no work; residuals of the others."""
        self.x = torch.zeros_like(self.b)
        self.r, self.residual = self.b, self.reference
        self.status = torch.full_like(self.scale, Status.MAX_STEPS, dtype=torch.int64)
        self.steps = torch.zeros_like(self.status)
        self.evaluations = torch.zeros_like(self.status)
        self.open = self.usable & (self.reference > 0)
        if x0 is not None:
            self._start_at(x0.to(self.b.dtype) / self.scale)
        self._close(~self.usable, Status.NONFINITE)
        self.residual = torch.where(self.usable, self.residual, torch.inf)
        self._close(self.usable & (self.residual <= self.limit), Status.CONVERGED)
        self.history = History(self.reference, self.residual, self.record, self.callback)

    def _start_at(self, x: Tensor) -> None:
        rows = torch.nonzero(self.open.squeeze(1)).flatten()
        if rows.numel() == 0:
            return
        finite = torch.isfinite(x).all(1, keepdim=True)
        x = torch.where(self.open & finite, x, 0)
        r = self._true_residual(x, rows)
        length = norm(r)
        good = finite & torch.isfinite(length)
        self.evaluations += self.open
        self._close(self.open & ~good, Status.NONFINITE)
        moved = self.open & good
        self.x, self.r = torch.where(moved, x, self.x), torch.where(moved, r, self.r)
        self.residual = torch.where(moved, length, self.residual)

    def _close(self, rows: Tensor, status: Status | Tensor) -> None:
        self.status = torch.where(rows, status, self.status)
        self.open = self.open & ~rows

    def _true_residual(self, x: Tensor, rows: Tensor) -> Tensor:
        """``b - A x`` (B, D), by one product for the samples ``rows``; ``b`` elsewhere."""
        sent = x * self.scale
        if not self.compact or rows.numel() == self.b.shape[0]:
            self.product.select(self.all_rows)
            return self.b - self.product.exact(sent) / self.scale
        self.product.select(rows)
        image = self.product.exact(sent.index_select(0, rows))
        return self.b.index_add(0, rows, image / self.scale.index_select(0, rows), alpha=-1)

    def _round(self, rows: Tensor) -> Round:
        """Run the Krylov method until every sample of ``rows`` has stopped."""
        outcome = Round.empty(self.x, self.residual)
        budget = self.max_steps - self.evaluations
        caps = set(budget.index_select(0, rows).flatten().tolist())
        if not self.compact:
            rows = self.all_rows
        self.product.select(rows)
        whole = rows.numel() == self.all_rows.numel()

        def part(tensor: Tensor) -> Tensor:
            return tensor if whole else tensor.index_select(0, rows)

        run = self.solver.start(part(self.r), part(self.limit), part(self.open))
        watch, running = Watch(self.b.device), rows.numel()
        for step in range(max(caps)):
            if step + 1 in caps:
                self._reserve(run, rows, budget.index_select(0, rows) == step + 1)
            if step in caps:
                run.stop(budget.index_select(0, rows) == step)
            active = run.active
            run.absorb(self.product(run.direction))
            self.history.note(rows, active, run.current())
            if run.exhausted:
                break
            mask = watch(run.active.squeeze(1))
            left = running if mask is None else int(mask.count_nonzero())
            if left == 0:
                break
            if left == running or mask is None:
                continue
            if not self.compact or (rows.numel() - left) * SHRINK < rows.numel():
                run.quiet()
                running = left
                continue
            run, rows = self._shrink(run, rows, mask, outcome)
            running = left
            watch.reset()
        outcome.harvest(run, rows)
        return outcome

    def _shrink(
        self, run: KrylovRun, rows: Tensor, mask: Tensor, outcome: Round
    ) -> tuple[KrylovRun, Tensor]:
        """Let the rows leave where the host's ``mask`` is False; their results are kept."""
        gone = torch.nonzero(~mask).flatten().to(rows.device)
        stay = torch.nonzero(mask).flatten().to(rows.device)
        outcome.harvest(run.rows(gone), rows.index_select(0, gone))
        rows = rows.index_select(0, stay)
        self.product.select(rows)
        return run.rows(stay), rows

    def _reserve(self, run: KrylovRun, rows: Tensor, last: Tensor) -> None:
        """Before the last product: keep it for the check, where the check will be needed."""
        x = self.x.index_select(0, rows) + run.solution()
        believed = run.reliable() & (self._drift(x, rows, run.matrix_norm) <= run.residual())
        run.stop(last & ~believed)

    def _drift(self, x: Tensor, rows: Tensor, matrix_norm: Tensor) -> Tensor:
        """Bound on what rounding has done to the residual of a recurrence, (n, 1)."""
        reference = self.reference.index_select(0, rows)
        return DRIFT * self.product.eps * (matrix_norm * norm(x) + reference)

    def _judge(self, outcome: Round, rows: Tensor) -> None:
        """Close the samples of a round, check those whose residual cannot be believed."""
        self.steps = self.steps + outcome.products
        self.evaluations = self.evaluations + outcome.products
        x = self.x + outcome.step
        drift = self._drift(x, self.all_rows, outcome.matrix_norm)
        exact = outcome.residual == self.residual  # no step was taken
        believed = outcome.reliable & (drift <= torch.maximum(outcome.residual, self.limit)) | exact
        spent = (self.evaluations >= self.max_steps) | (outcome.products == 0)
        unfinished = outcome.verdict == Status.MAX_STEPS
        closing = self.open & (spent | (believed & ~unfinished))
        better = closing & (outcome.residual < self.residual)
        self.x = choose(better, x, self.x)
        self.residual = torch.where(better, outcome.residual, self.residual)
        self._close(closing, outcome.verdict)
        self._check(outcome, x)

    def _check(self, outcome: Round, x: Tensor) -> None:
        """True residuals of the samples still open at ``x``; who has gained nothing has stalled."""
        rows = torch.nonzero(self.open.squeeze(1)).flatten()
        if rows.numel() == 0:
            return
        x = self.product.rounded(x * self.scale) / self.scale
        checked = self.open
        r = self._true_residual(x, rows)
        length = norm(r)
        self.evaluations = self.evaluations + checked
        self.history.note(self.all_rows, checked, length)
        better = checked & (length < self.residual)
        claimed = outcome.verdict == Status.CONVERGED
        enough = torch.where(claimed, HALVED, 1 - torch.finfo(length.dtype).eps ** 0.5)
        gained = length <= enough * self.residual
        self.x, self.r = torch.where(better, x, self.x), torch.where(better, r, self.r)
        self.residual = torch.where(better, length, self.residual)
        self._close(checked & (length <= self.limit), Status.CONVERGED)
        self._close(self.open & ~torch.isfinite(length), Status.NONFINITE)
        broken = ~claimed & (outcome.verdict != Status.MAX_STEPS)
        self._close(self.open & broken, outcome.verdict)
        self._close(self.open & ~gained, Status.STALLED)
        self._close(self.open & (self.evaluations >= self.max_steps), Status.MAX_STEPS)

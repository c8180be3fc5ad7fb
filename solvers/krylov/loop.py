"""The loop behind :func:`solvers.solve_linear`: cycles of a Krylov method, verified residuals."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from solvers.core.arrays import SILENT, Array
from solvers.core.device import Watch
from solvers.core.plain.turns import SHRINK
from solvers.core.rows import Progress
from solvers.core.solution import Solution, Status, Trace
from solvers.krylov.cycle import Cycle, Results
from solvers.krylov.method import LinearSolver, dot, norm
from solvers.krylov.product import Product, System

# Rounding moves the residual of a recurrence away from the true one by at most about
# GAP eps (|A| |x| + |b|), ten times the largest gap that was measured.
GAP = 40.0
# A step is expected to leave more than this of the residual.
RESERVE = 1e-3
# A cycle that converged by its recurrence but did not halve the true residual: rounding limits it.
HALVED = 0.5


class LinearLoop:
    """One solve by cycles of a Krylov method, each sample until it has converged or cannot.

    A cycle runs the method on ``A d = r`` for the open samples, in lockstep, until each has
    converged by its recurrence, has broken down, has used its products, or has reached the restart
    of GMRES. Then a sample is closed if its recurrence residual is accurate. Else its true residual
    is computed by one more product, and the sample is closed or enters the next cycle.

    Of each sample are kept the best iterate ``x`` and, while it is ``open``, its residual ``r``, (B, D),
    and (B, 1) arrays: ``residual_norm``, the norm ``target`` that a cycle aims at, ``status``, the
    ``steps`` of the method and the ``evaluations``, which are products with ``A``.
    """

    def __init__(
        self,
        product: Product,
        system: System,
        solver: LinearSolver,
        max_steps: int,
        *,
        compact: bool,
        record: bool,
        callback: Callable[[Progress], object] | None,
    ) -> None:
        self.product, self.system, self.arrays = product, system, system.arrays
        self.solver, self.max_steps, self.compact = solver, max_steps, compact
        self.record, self.callback = record, callback
        self.noting = record or callback is not None
        self.columns: list[Tensor] = []
        self.noted = 0  # batches of products so far
        self.all_rows = self.arrays.range(len(system.b))
        self.x, self.moved = torch.zeros_like(system.b), False
        self.r, self.residual_norm, self.target = system.b, system.reference, system.limit
        self.open = system.finite & (system.reference > 0)
        self.steps = self.evaluations = self.arrays.whole(self.open)
        self.status = self.steps + int(Status.MAX_STEPS)

    def run(self, x0: Tensor | None, scale: bool = False) -> Solution:
        """Solve from ``x0`` (B, D) or zero; the value is a matrix (B, D) of the working dtype.

        ``scale``: from the multiple of ``x0`` that has the least residual.
        """
        with SILENT():
            self._begin(x0, scale)
        while len(rows := self.arrays.index(self.open)) > 0:
            result = self._cycle(rows)
            with SILENT():
                self._accept(result)
        return self._solution()

    def _begin(self, x0: Tensor | None, scale: bool) -> None:
        """Close the samples that need no work."""
        system = self.system
        if x0 is not None:
            self._start_at(system.scaled(x0.detach().to(system.b.dtype)), scale)
        self._close(~system.finite, Status.NONFINITE)
        self.residual_norm = self.arrays.xp.where(system.finite, self.residual_norm, torch.inf)
        self._close(self.residual_norm <= system.limit, Status.CONVERGED)
        if self.record:
            self.columns.append(system.relative(self.residual_norm))

    def _start_at(self, x: Tensor, scale: bool) -> None:
        """Replace the start 0 by ``x`` (B, D), for one product of every open sample."""
        arrays, rows = self.arrays, self.arrays.index(self.open)
        if len(rows) == 0:
            return
        finite = arrays.read(torch.isfinite(x).all(1, keepdim=True))
        x = torch.where(arrays.write(self.open & finite), x, 0)
        r = self._true_residual(x, rows)
        if scale:
            image = self.system.b - r
            factor = dot(image, self.system.b) / dot(image, image)
            factor = torch.where(torch.isfinite(factor), factor, 0)
            x, r = x * factor, torch.addcmul(self.system.b, image, factor, value=-1)
        r_norm = arrays.read(norm(r))
        self.evaluations = self.evaluations + self.open
        self._close(self.open & ~(finite & (r_norm < torch.inf)), Status.NONFINITE)
        self._move(self.open, x, r, r_norm)

    def _move(self, rows: Array, x: Tensor, r: Tensor, r_norm: Array) -> None:
        """In ``rows`` (B, 1) the point ``x`` with the residual ``r`` becomes the best iterate."""
        self.x, self.moved = self.arrays.choose(rows, x, self.x), True
        self.r = self.arrays.choose(rows, r, self.r)
        self.residual_norm = self.arrays.xp.where(rows, r_norm, self.residual_norm)

    def _close(self, rows: Array, status: Status | Array) -> None:
        """End the samples ``rows`` (B, 1) with ``status``."""
        self.status = self.arrays.xp.where(rows, status, self.status)
        self.open = self.open & ~rows

    def _note(self, rows: Array, running: Array, residual: Array) -> None:
        """One product: residual norms (n, 1) of the samples ``rows``, where ``running`` (n, 1)."""
        norms = self.arrays.xp.full_like(self.system.reference, torch.nan)
        norms[rows] = self.arrays.xp.where(running, residual, torch.nan)
        column = self.system.relative(norms)
        self.noted += 1
        if self.record:
            self.columns.append(column)
        if self.callback is not None:
            self.callback(Progress(self.noted, column, None, self.arrays.count(running)))

    def _true_residual(self, x: Tensor, rows: Array) -> Tensor:
        """``b - A x`` (B, D), by one product for the samples ``rows``; ``b`` elsewhere."""
        index, sent = self._select(rows), self.system.unscaled(x)
        if len(index) == len(self.all_rows):
            return self.system.b - self.system.scaled(self.product.exact(sent))
        image = self.product.exact(sent.index_select(0, index))
        image = torch.zeros_like(x).index_copy_(0, index, image)
        return self.system.b - self.system.scaled(image)

    def _select(self, rows: Array) -> Tensor:
        """Multiply ``rows`` from now on, or all samples where they must stay together."""
        index = self.arrays.write(rows if self.compact else self.all_rows)
        self.product.select(index)
        return index

    def _cycle(self, rows: Array) -> Results:
        """Run the Krylov method until every sample of ``rows`` has stopped."""
        arrays, index = self.arrays, self._select(rows)
        chosen = arrays.read(index)
        limit, active = arrays.write(self.target[chosen]), arrays.write(self.open[chosen])
        whole = len(index) == len(self.all_rows)
        r = self.r if whole else self.r.index_select(0, index)
        with SILENT():
            run = self.solver.start(r, limit, active)
        cycle = Cycle(run, chosen, self.system, self.residual_norm)
        budget = self.max_steps - self.evaluations
        ends = set(budget[rows].flatten().tolist())
        watch = Watch(self.system.b.device)
        for step in range(max(ends)):
            if step + 1 in ends:
                with SILENT():
                    self._reserve_product(cycle, budget[cycle.rows] == step + 1)
            if step in ends:
                cycle.run.stop(arrays.write(budget[cycle.rows] == step))
            if not self._goes_on(cycle, watch):
                break
            active = self.arrays.copy(cycle.run.running) if self.noting else None
            self.product.advance(cycle.run)
            if self.noting:
                with SILENT():
                    latest = cycle.run.current()
                self._note(cycle.rows, active, latest)
            if cycle.run.exhausted:
                break
        with SILENT():
            return cycle.results()

    def _goes_on(self, cycle: Cycle, watch: Watch) -> bool:
        """Whether any sample of the cycle still runs; stopped ones leave, or multiply zeros."""
        run, size = cycle.run, len(cycle.rows)
        mask = run.running if self.arrays.host else watch(run.running)
        running = cycle.running if mask is None else self.arrays.count(mask)
        if running == 0 or running == cycle.running or mask is None:
            return running > 0
        cycle.running = running
        if not self.compact or (size - running) * SHRINK < size:
            run.zero_stopped()
            return True
        if not self.arrays.host:  # the watch's answer lies in pinned memory
            mask = mask.to(run.running.device)
        cycle.shrink(mask)
        self.product.select(self.arrays.write(cycle.rows))
        watch.reset()
        return True

    def _reserve_product(self, cycle: Cycle, last: Array) -> None:
        """Stop the samples whose ``last`` product will be needed to verify the residual."""
        run, rows = cycle.run, cycle.rows
        start = self.x.index_select(0, self.arrays.write(rows))
        end = start + run.solution()
        gap = self._residual_gap(start, end, self.system.reference[rows], run.matrix_norm)
        # The last step may leave a residual that is smaller still.
        enough = self.arrays.xp.maximum(RESERVE * run.residual_norm, self.system.limit[rows] / 2)
        accurate = run.reliable() & (gap <= enough)
        run.stop(self.arrays.write(last & ~accurate & (run.used > 0)))

    def _residual_gap(
        self, start: Tensor, end: Tensor, reference: Array, matrix_norm: Array
    ) -> Array:
        """Bound on what rounding has done to the residual of a recurrence, (n, 1).

        The recurrence went from ``start`` to ``end`` (n, D).
        """
        length = norm(end)
        size = self.arrays.read(torch.maximum(norm(start), length) if self.moved else length)
        return GAP * self.product.eps * (matrix_norm * size + reference)

    def _accept(self, result: Results) -> None:
        """Close the samples whose recurrence residual is accurate, verify the others.

        Where no product is left to verify a doubtful residual, the last verified iterate stays.
        """
        arrays, system = self.arrays, self.system
        self.steps = self.steps + result.used
        self.evaluations = self.evaluations + result.used
        x = self.x + result.correction if self.moved else result.correction
        gap = self._residual_gap(self.x, x, system.reference, result.matrix_norm)
        small_gap = gap <= arrays.xp.maximum(result.residual_norm, system.limit)
        unmoved = result.residual_norm == self.residual_norm  # no step was taken
        accurate = (result.reliable & small_gap & self._representable(x)) | unmoved
        spent = (self.evaluations >= self.max_steps) | (result.used == 0)
        finished = result.verdict != int(Status.MAX_STEPS)
        closing = self.open & (spent | (accurate & finished))
        better = closing & accurate & (result.residual_norm < self.residual_norm)
        self.x, self.moved = arrays.choose(better, x, self.x), True
        self.residual_norm = arrays.xp.where(better, result.residual_norm, self.residual_norm)
        # Converged by the recurrence alone, with no product left to verify it: not converged.
        claimed = result.verdict == int(Status.CONVERGED)
        verdict = arrays.xp.where(claimed & ~accurate, int(Status.MAX_STEPS), result.verdict)
        short = claimed & accurate & (result.residual_norm > system.limit)
        verdict = arrays.xp.where(short, int(Status.STALLED), verdict)
        self._close(closing, verdict)
        rows = arrays.index(self.open)
        if len(rows) > 0:
            self._verify(result, x, rows)

    def _representable(self, x: Tensor) -> Array:
        """(B, 1) bool: the dtypes of the right-hand side hold ``x``, which is wider and scaled."""
        size = self.arrays.read(x.abs().amax(1, keepdim=True))
        held = size if self.system.factor is None else size * self.system.scale
        return (size == 0) | ((held >= self.product.tiny) & (held <= self.product.largest))

    def _verify(self, result: Results, x: Tensor, rows: Array) -> None:
        """True residuals of the open samples at ``x``; those that gained nothing have stalled."""
        x = self.system.scaled(self.product.rounded(self.system.unscaled(x)))
        verified, limit = self.open, self.system.limit
        r = self._true_residual(x, rows)
        r_norm = self.arrays.read(norm(r))
        self.evaluations = self.evaluations + verified
        if self.noting:
            self._note(self.all_rows, verified, r_norm)
        claimed = result.verdict == int(Status.CONVERGED)
        within = r_norm <= limit
        # An iterate that is better by no more than rounding may be worse in every other way.
        decrease = 1 - torch.finfo(x.dtype).eps ** 0.5
        better = within | (r_norm < decrease * self.residual_norm)
        gained = better & ((r_norm <= HALVED * self.residual_norm) | ~claimed)
        self._move(verified & better, x, r, r_norm)
        # Where the recurrence converged too early the next cycle has to go further.
        self.target = self.arrays.xp.where(verified & claimed, HALVED * limit, self.target)
        broken = ~claimed & (result.verdict != int(Status.MAX_STEPS))
        self._close(verified & within, Status.CONVERGED)
        self._close(self.open & ~(r_norm < torch.inf), Status.NONFINITE)
        self._close(self.open & broken, result.verdict)
        self._close(self.open & ~gained, Status.STALLED)
        self._close(self.open & (self.evaluations >= self.max_steps), Status.MAX_STEPS)

    def _solution(self) -> Solution:
        write, system = self.arrays.write, self.system
        return Solution(
            value=system.unscaled(self.x),
            status=write(self.status.reshape(-1)),
            residual=system.relative(self.residual_norm),
            residual_norm=write((self.residual_norm * system.scale).reshape(-1)),
            steps=write(self.steps.reshape(-1)),
            evaluations=write(self.evaluations.reshape(-1)),
            trace=Trace(torch.stack(self.columns, dim=1)) if self.record else None,
        )

"""The loop behind :func:`solvers.solve_linear`: cycles of a Krylov method, verified residuals."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from solvers.core.arrays import Array
from solvers.core.device import Watch
from solvers.core.loop import SHRINK
from solvers.core.rows import Progress
from solvers.core.solution import Solution, Status
from solvers.krylov.cycle import Cycle, ResidualTrace, SampleState
from solvers.krylov.method import LinearSolver, norm
from solvers.krylov.product import Product, System

# Rounding moves the residual of a recurrence away from the true one by at most about
# GAP eps (|A| |x| + |b|), ten times the largest gap that was measured.
GAP = 40.0
# A cycle that converged by its recurrence but did not halve the true residual: rounding limits it.
HALVED = 0.5


class LinearLoop:
    """One solve by cycles of a Krylov method, each sample until it has converged or cannot.

    A cycle runs the method on ``A d = r`` for the open samples, in lockstep, until each has
    converged by its recurrence, has broken down, has used its products, or has reached the restart
    of GMRES. Then a sample is closed if its recurrence residual is accurate. Else its true residual
    is computed by one more product, and the sample is closed or enters the next cycle.
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
        self.all_rows = self.arrays.range(len(system.b))
        self.state = SampleState(system)
        self.trace = ResidualTrace(system, record, callback)

    def run(self, x0: Tensor | None) -> Solution:
        """Solve from ``x0`` (B, D) or zero; the value is a matrix (B, D) of the working dtype."""
        with numpy.errstate(all="ignore"):
            self._begin(x0)
        while len(rows := self.arrays.index(self.state.open)) > 0:
            result = self._cycle(rows)
            with numpy.errstate(all="ignore"):
                self._accept(result)
        return self._solution()

    def _begin(self, x0: Tensor | None) -> None:
        """Close the samples that need no work."""
        state, system = self.state, self.system
        if x0 is not None:
            self._start_at(system.scaled(x0.detach().to(system.b.dtype)))
        state.close(~system.finite, Status.NONFINITE)
        state.residual_norm = self.arrays.xp.where(system.finite, state.residual_norm, torch.inf)
        state.close(state.residual_norm <= system.limit, Status.CONVERGED)
        self.trace.start(state.residual_norm)

    def _start_at(self, x: Tensor) -> None:
        """Replace the start 0 by ``x`` (B, D), for one product of every open sample."""
        arrays, state = self.arrays, self.state
        rows = arrays.index(state.open)
        if len(rows) == 0:
            return
        finite = arrays.read(torch.isfinite(x).all(1, keepdim=True))
        x = torch.where(arrays.write(state.open & finite), x, 0)
        r = self._true_residual(x, rows)
        r_norm = arrays.read(norm(r))
        good = finite & (r_norm < torch.inf)
        state.evaluations = state.evaluations + state.open
        moved = state.open & good
        state.close(state.open & ~good, Status.NONFINITE)
        state.move(moved, x, r, r_norm)

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

    def _cycle(self, rows: Array) -> Cycle:
        """Run the Krylov method until every sample of ``rows`` has stopped."""
        budget = self.max_steps - self.state.evaluations
        ends = set(budget[rows].flatten().tolist())
        cycle = self._start_cycle(rows)
        watch = Watch(self.system.b.device)
        for step in range(max(ends)):
            if step + 1 in ends:
                self._reserve_product(cycle, budget[cycle.rows] == step + 1)
            if step in ends:
                cycle.run.stop(self.arrays.write(budget[cycle.rows] == step))
            if not self._goes_on(cycle, watch):
                break
            active = cycle.run.running
            cycle.run.absorb(self.product(cycle.run.direction))
            if self.trace.wanted:
                self.trace.note(cycle.rows, active, cycle.run.current())
            if cycle.run.exhausted:
                break
        cycle.finish(cycle.run, cycle.rows)
        return cycle

    def _start_cycle(self, rows: Array) -> Cycle:
        arrays, state = self.arrays, self.state
        index = self._select(rows)
        limit, active = (arrays.write(array)[index] for array in (state.target, state.open))
        run = self.solver.start(state.r.index_select(0, index), limit, active)
        return Cycle(run, arrays.read(index), state)

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
        x = self.state.x.index_select(0, self.arrays.write(rows)) + run.solution()
        gap = self._residual_gap(x, self.system.reference[rows], run.matrix_norm)
        accurate = run.reliable() & (gap <= run.residual_norm)
        run.stop(self.arrays.write(last & ~accurate))

    def _residual_gap(self, x: Tensor, reference: Array, matrix_norm: Array) -> Array:
        """Bound on what rounding has done to the residual of a recurrence, (n, 1)."""
        size = self.arrays.read(norm(x))
        return GAP * self.product.eps * (matrix_norm * size + reference)

    def _accept(self, result: Cycle) -> None:
        """Close the samples whose recurrence residual is accurate, verify the others."""
        arrays, state, system = self.arrays, self.state, self.system
        state.steps = state.steps + result.used
        state.evaluations = state.evaluations + result.used
        x = state.x + result.correction
        gap = self._residual_gap(x, system.reference, result.matrix_norm)
        small_gap = gap <= arrays.xp.maximum(result.residual_norm, system.limit)
        unmoved = result.residual_norm == state.residual_norm  # no step was taken
        accurate = (result.reliable & small_gap) | unmoved
        spent = (state.evaluations >= self.max_steps) | (result.used == 0)
        finished = result.verdict != int(Status.MAX_STEPS)
        closing = state.open & (spent | (accurate & finished))
        better = closing & (result.residual_norm < state.residual_norm)
        state.x = arrays.choose(better, x, state.x)
        state.residual_norm = arrays.xp.where(better, result.residual_norm, state.residual_norm)
        # Converged by the recurrence, with no product left to verify it: not converged.
        claimed = result.verdict == int(Status.CONVERGED)
        verdict = arrays.xp.where(claimed & ~accurate, int(Status.MAX_STEPS), result.verdict)
        state.close(closing, verdict)
        rows = arrays.index(state.open)
        if len(rows) > 0:
            self._verify(result, x, rows)

    def _verify(self, result: Cycle, x: Tensor, rows: Array) -> None:
        """True residuals of the open samples at ``x``; those that gained nothing have stalled."""
        arrays, state, limit = self.arrays, self.state, self.system.limit
        x = self.system.scaled(self.product.rounded(self.system.unscaled(x)))
        verified = state.open
        r = self._true_residual(x, rows)
        r_norm = arrays.read(norm(r))
        state.evaluations = state.evaluations + verified
        if self.trace.wanted:
            self.trace.note(self.all_rows, verified, r_norm)
        claimed = result.verdict == int(Status.CONVERGED)
        within = r_norm <= limit
        # An iterate that is better by no more than rounding may be worse in every other way.
        decrease = 1 - torch.finfo(x.dtype).eps ** 0.5
        better = within | (r_norm < decrease * state.residual_norm)
        gained = better & ((r_norm <= HALVED * state.residual_norm) | ~claimed)
        state.move(verified & better, x, r, r_norm)
        # Where the recurrence converged too early the next cycle has to go further.
        state.target = arrays.xp.where(verified & claimed, HALVED * limit, state.target)
        broken = ~claimed & (result.verdict != int(Status.MAX_STEPS))
        state.close(verified & within, Status.CONVERGED)
        state.close(state.open & ~(r_norm < torch.inf), Status.NONFINITE)
        state.close(state.open & broken, result.verdict)
        state.close(state.open & ~gained, Status.STALLED)
        state.close(state.open & (state.evaluations >= self.max_steps), Status.MAX_STEPS)

    def _solution(self) -> Solution:
        write, state, system = self.arrays.write, self.state, self.system
        return Solution(
            value=system.unscaled(state.x),
            status=write(state.status.reshape(-1)),
            residual=system.relative(state.residual_norm),
            residual_norm=write((state.residual_norm * system.scale).reshape(-1)),
            steps=write(state.steps.reshape(-1)),
            evaluations=write(state.evaluations.reshape(-1)),
            trace=self.trace.trace(),
        )

"""The only loop: evaluate, judge, record, let finished samples leave, ask for the next point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from solvers.core.device import Watch, maybe_any
from solvers.core.problem import Problem
from solvers.core.rows import (
    RUNNING,
    Point,
    Progress,
    Rows,
    keep_rows,
    merge_points,
    select_rows,
    where_rows,
)
from solvers.core.safeguard import MAX_REJECTIONS, Backtracking, acceptable, fall_back, rounding
from solvers.core.solution import Solution, Status, Trace
from solvers.core.solver import Solver, Turn
from solvers.core.tolerance import Tolerance

DIVERGENCE = 1e6  # largest residual, against the scale of the first evaluation
PATIENCE = 100  # evaluations without a better residual after which a sample has stalled
SHRINK = 16  # the batch is made smaller when 1/SHRINK of it has finished


class Loop:
    """One solve. ``run`` returns a :class:`Solution` whose value is the matrix (B, D)."""

    def __init__(
        self,
        problem: Problem,
        solver: Solver,
        tolerance: Tolerance,
        max_steps: int,
        *,
        compact: bool = True,
        record: bool = False,
        callback: Callable[[Progress], object] | None = None,
    ) -> None:
        self.problem, self.solver, self.tolerance = problem, solver, tolerance
        self.max_steps, self.compact = max_steps, compact
        self.columns: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] | None = None
        if record:
            self.columns = []
        self.callback = callback
        self.finished: list[Rows] = []
        self.ended = False  # some row of the working batch has ended
        self.recovering = False  # some row was rejected at the last turn
        # Nobody looks at every single evaluation: uneventful ones can take the fast path.
        watched = problem.has_energy or solver.searches or record or callback
        self.plain = not (watched or tolerance.atol)

    def run(self, z: Tensor) -> Solution:
        self.batch = z.shape[0]
        self.problem.max_steps = self.max_steps
        self.plain = self.plain and z.device.type == "cpu"
        self.watch = Watch(z.device)
        last: Point | None = None
        state: Any = None
        for evaluation in range(1, self.max_steps + 1):
            trial = self.problem.evaluate(z)
            if state is not None and self._smooth(trial, evaluation):
                last = trial
                z = self.solver.step(state, Turn(trial, trial, None, self.problem))
                continue
            accepted = self._judge(trial, last)
            if last is None:
                self.rows = self._first(trial)
                self.memory = Backtracking.start(trial.norm)
            self._record(trial, accepted, evaluation)
            if self._all_ended():
                break
            current = (
                trial if accepted is None or last is None else merge_points(accepted, trial, last)
            )
            current, trial, accepted, state = self._shrink(current, trial, accepted, state)
            if state is None:
                state = self.solver.init(current, self.problem)
            last = current
            z = self._propose(state, current, trial, accepted)
            if self.solver.searches:
                self._charge(getattr(state, "extra", None))
        return self._solution()

    def _charge(self, extra: Tensor | None) -> None:
        """Products with the Jacobian that a Newton method has made, for rows still running."""
        if extra is not None:
            running = self.rows.status == RUNNING
            self.rows.extra = torch.where(running, extra, self.rows.extra)

    def _smooth(self, trial: Point, evaluation: int) -> bool:
        """Fast path of the CPU: every row is running, improves, and none has converged.

        Then only the best iterate changes; counts are brought up to date by the next full account.
        """
        due = evaluation == self.max_steps or evaluation % PATIENCE == 0
        if due or self.ended or self.recovering or not self.plain:
            return False
        relative = trial.norm / trial.reference
        numbers = relative.numpy()
        if not (numbers < self.rows.relative.numpy()).all():  # False also for NaN
            return False
        if numbers.min() <= self.tolerance.rtol:
            return False
        if not (trial.norm.numpy() <= self.rows.limit.numpy()).all():
            return False
        rows = self.rows
        rows.value, rows.relative, rows.norm = trial.z, relative, trial.norm
        return True

    def _judge(self, trial: Point, last: Point | None) -> Tensor | None:
        """Accepted rows, or None for all of them."""
        accepted = acceptable(trial, last, None if last is None else self.rows.limit)
        return accepted if maybe_any(~accepted) else None

    def _first(self, trial: Point) -> Rows:
        count = trial.norm.shape[0]
        infinite = torch.full_like(trial.norm, torch.inf)
        whole = torch.zeros(count, dtype=torch.int64, device=trial.norm.device)
        scale = torch.maximum(trial.norm, trial.reference)
        return Rows(
            index=torch.arange(count, device=trial.norm.device),
            value=trial.z,
            relative=infinite,
            norm=infinite,
            energy=None if trial.energy is None else torch.full_like(trial.energy, torch.nan),
            status=whole + RUNNING,
            rejected=whole,
            evaluations=whole,
            extra=whole,
            limit=DIVERGENCE * scale,
            milestone=infinite,
            energy_milestone=infinite,
        )

    def _record(self, trial: Point, accepted: Tensor | None, evaluation: int) -> None:
        """Update the best iterate and the status of every row that is still running."""
        rows = self.rows
        running = rows.status == RUNNING
        tiny = torch.finfo(trial.norm.dtype).tiny
        relative = trial.norm / trial.reference.clamp_min(tiny)
        taken = running if accepted is None else running & accepted
        converged = taken & (trial.norm <= self.tolerance.threshold(trial.reference))
        better = (taken & (relative < rows.relative)) | converged
        self._keep(trial, relative, better)
        rows.evaluations = torch.where(running, evaluation + rows.extra, rows.evaluations)
        if accepted is not None:
            rows.rejected = rows.rejected + (running & ~accepted)
        self._trace(relative, trial.energy, accepted, running, evaluation)
        status = torch.where(converged, int(Status.CONVERGED), rows.status)
        over = (rows.evaluations >= self.max_steps) & (status == RUNNING)
        status = torch.where(over, int(Status.MAX_STEPS), status)
        if accepted is not None:
            status = self._give_up(status, accepted, trial, evaluation)
        if evaluation % PATIENCE == 0:
            status = self._check_progress(status, trial, accepted)
        rows.status = status

    def _check_progress(self, status: Tensor, trial: Point, accepted: Tensor | None) -> Tensor:
        """Rows with neither a better residual nor a lower energy since the last check have stalled."""
        rows = self.rows
        stuck = (rows.relative > 0.99 * rows.milestone) & (status == RUNNING)
        rows.milestone = rows.relative
        if trial.energy is not None:
            energy = trial.energy.detach()
            if accepted is not None:
                energy = torch.where(accepted, energy, rows.energy_milestone)
            fell = energy < rows.energy_milestone - rounding(energy)
            stuck = stuck & ~fell
            rows.energy_milestone = torch.minimum(energy, rows.energy_milestone)
        return torch.where(stuck, int(Status.STALLED), status)

    def _keep(self, trial: Point, relative: Tensor, better: Tensor) -> None:
        rows = self.rows
        if trial.z.device.type == "cpu" and bool(better.all()):
            rows.value, rows.relative, rows.norm = trial.z, relative, trial.norm
            rows.energy = trial.energy
            return
        if not maybe_any(better):
            return
        rows.value = where_rows(better, trial.z, rows.value)
        rows.relative = torch.where(better, relative, rows.relative)
        rows.norm = torch.where(better, trial.norm, rows.norm)
        if rows.energy is not None and trial.energy is not None:
            rows.energy = torch.where(better, trial.energy, rows.energy)

    def _give_up(self, status: Tensor, accepted: Tensor, trial: Point, evaluation: int) -> Tensor:
        """Rows that were rejected too often, or whose plain step too leads far away.

        The very first point has nothing to fall back on.
        """
        rejected = ~accepted & (status == RUNNING)
        finite = torch.isfinite(trial.norm + trial.reference)
        if trial.energy is not None:
            finite = finite & torch.isfinite(trial.energy.detach())
        tried = MAX_REJECTIONS if evaluation > 1 else 0
        hopeless = rejected & (self.memory.rejections >= tried)
        reason = torch.where(finite, int(Status.STALLED), int(self.solver.lost))
        status = torch.where(hopeless, reason, status)
        if trial.energy is not None:  # descent will find a step that is short enough
            return status
        wild = rejected & (self.memory.rejections > 0) & (trial.norm > self.rows.limit)
        return torch.where(wild, int(Status.DIVERGED), status)

    def _propose(self, state: Any, current: Point, trial: Point, accepted: Tensor | None) -> Tensor:
        candidate = self.solver.step(state, Turn(current, trial, accepted, self.problem))
        if accepted is None:
            if self.recovering:
                self.memory.note(torch.ones_like(self.memory.rejections, dtype=torch.bool))
                self.recovering = False
            return candidate
        self.recovering = True
        if self.solver.searches:
            self.memory.note(accepted)
            return candidate
        return fall_back(self.memory, current, trial, accepted, candidate)

    def _all_ended(self) -> bool:
        seen = self.watch(self.rows.status == RUNNING)
        if seen is None:
            return False
        self.ended = not bool(seen.all())
        return self.ended and not bool(seen.any())

    def _shrink(
        self, current: Point, trial: Point, accepted: Tensor | None, state: Any
    ) -> tuple[Point, Point, Tensor | None, Any]:
        """Let finished rows leave, their history with them, when enough of them have finished."""
        if not (self.ended and self.compact):
            return current, trial, accepted, state
        ended = self.rows.status != RUNNING
        number = int(ended.sum()) if current.z.device.type == "cpu" else 0
        if number * SHRINK < ended.numel() or number == 0:
            return current, trial, accepted, state
        self.ended = False
        stay = torch.nonzero(~ended).flatten()
        self.finished.append(select_rows(self.rows, torch.nonzero(ended).flatten()))
        self.rows = select_rows(self.rows, stay)
        self.memory = select_rows(self.memory, stay)
        self.problem = self.problem.rows(stay, ended.numel())
        same = trial is current
        current = select_rows(current, stay)
        trial = current if same else select_rows(trial, stay)
        accepted = None if accepted is None else accepted.index_select(0, stay)
        if state is not None:
            keep_rows(state, stay)
        return current, trial, accepted, state

    def _trace(
        self,
        relative: Tensor,
        energy: Tensor | None,
        accepted: Tensor | None,
        running: Tensor,
        evaluation: int,
    ) -> None:
        if self.columns is None and self.callback is None:
            return
        index = self.rows.index[running]

        def spread(values: Tensor, empty: float) -> Tensor:
            column = values.new_full((self.batch,), empty)
            return column.index_copy(0, index, values.detach()[running])

        residual = spread(relative, torch.nan)
        energies = None if energy is None else spread(energy, torch.nan)
        taken = torch.ones_like(running) if accepted is None else accepted
        column = (residual, spread(taken, False), energies, index)
        if self.columns is not None:
            self.columns.append(column)
        if self.callback is not None:
            self.callback(Progress(evaluation, residual, energies, index.numel()))

    def _solution(self) -> Solution:
        """Gather the rows in the caller's order."""
        parts = [*self.finished, self.rows]
        order = torch.argsort(torch.cat([part.index for part in parts]))

        def gather(name: str) -> Tensor:
            pieces = [getattr(part, name) for part in parts]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces).index_select(0, order)

        status = gather("status")
        trace = None
        if self.columns is not None:
            energies = [column[2] for column in self.columns if column[2] is not None]
            trace = Trace(
                torch.stack([column[0] for column in self.columns], dim=1),
                torch.stack(energies, dim=1) if energies else None,
                torch.stack([column[1] for column in self.columns], dim=1),
            )
        return Solution(
            value=gather("value"),
            status=status,
            residual=gather("relative"),
            residual_norm=gather("norm"),
            steps=gather("evaluations") - gather("extra") - gather("rejected"),
            evaluations=gather("evaluations"),
            energy=None if self.rows.energy is None else gather("energy").detach(),
            trace=trace,
        )

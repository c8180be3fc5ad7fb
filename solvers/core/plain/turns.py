"""The turns of most solves: no energy, no rejected step, no norm that is out of range, on the CPU.

What they decide is what :class:`solvers.core.loop.Loop` decides in full.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy
from torch import Tensor

from solvers.core.arrays import SILENT, Arrays, fits_numpy
from solvers.core.guards.native import native_steps
from solvers.core.problem import Problem
from solvers.core.rows import MODERATE_ABOVE, RUNNING, Point, Rows, Snapshots, where_rows
from solvers.core.solution import Status
from solvers.core.solver import Solver
from solvers.core.tolerance import Tolerance
from solvers.native.moves import Moves
from solvers.native.steps import number

SHRINK = 16  # the batch is made smaller when 1/SHRINK of it has finished
# Of a small one: there moving all histories costs about as much as an evaluation.
SHRINK_SMALL = 4
FEW = 16  # rows from which each one leaves at once


def _takes_own_step(kind: type[Solver]) -> bool:
    """Whether ``ring`` tells of another step than ``step``: a subclass may have changed that alone."""
    ring, step = (next(c for c in kind.__mro__ if name in vars(c)) for name in ("ring", "step"))
    return not issubclass(ring, step)


class PlainTurns(ABC):
    """The part of the loop that takes plain turns; its attributes are explained there."""

    problem: Problem
    solver: Solver
    tolerance: Tolerance
    max_steps: int
    trial: Point
    current: Point | None
    accepted: Tensor | None
    state: object
    rows: Rows
    snapshots: Snapshots
    arrays: Arrays
    moves: Moves | bool | None
    some_ended: bool
    recovering: bool
    patience: int
    brief_account: bool

    def _plain_account(self, evaluation: int) -> bool | None:
        """:meth:`_account` in NumPy, where every row accepts the trial; None where that is not so.

        The counts of the rows that go on are brought up to date when some row ends.
        """
        trial, rows, read, write = self.trial, self.rows, self.arrays.read, self.arrays.write
        norms, references = read(trial.norm), read(trial.reference)
        relative, best = norms / references, rows.best
        # No square of a norm did harm, and no row is far away, be it one that has ended.
        least, most = numpy.minimum.reduce, numpy.maximum.reduce
        fine = least(references) > MODERATE_ABOVE[trial.norm.dtype] and most(relative) < math.inf
        if not (fine and most(references) < math.inf and (norms <= read(rows.limit)).all()):
            return None
        if evaluation % self.patience == 0:
            return None
        converged = norms <= self.tolerance.threshold_of(references)
        better = (relative < read(best.relative)) | converged
        status = read(rows.status)
        running = status == RUNNING
        if self.some_ended:
            converged, better = converged & running, better & running
        if better.all():
            best.replace(trial, write(relative))
        elif better.any():
            best.value = where_rows(write(better), trial.z, best.value)
            best.relative = write(numpy.where(better, relative, read(best.relative)))
            best.norm = write(numpy.where(better, norms, read(best.norm)))
        self.current, self.accepted = trial, None
        over = evaluation >= self.max_steps
        if over or converged.any():
            counts = evaluation + read(rows.products)
            rows.evaluations = write(numpy.where(running, counts, read(rows.evaluations)))
            status = numpy.where(converged, int(Status.CONVERGED), status)
            if over:
                status = numpy.where(status == RUNNING, int(Status.MAX_STEPS), status)
            rows.status, self.some_ended = write(status), True
            if over or (status != RUNNING).all():
                return True
        self._shrink()
        return False

    @abstractmethod
    def _propose(self) -> Tensor:
        """The next point to evaluate (n, D)."""

    def _evaluate(self, evaluation: int) -> int:
        """Evaluate at the next point; the number of the evaluation that is to be judged.

        In C++ the solve goes on from there as long as every running row improves.
        """
        with SILENT():
            candidate = self._propose()
        moves = self._moves_from(candidate)
        if moves is None:
            self.trial = self.problem.evaluate(candidate)
            return evaluation + 1
        rows, solver, state, value_at = self.rows, self.solver, self.state, self.problem.lean_value
        status, running = None, None
        if self.some_ended:
            status, running = rows.status, rows.status == RUNNING
        assert self.current is not None
        candidate = candidate.contiguous()
        before = self.current.z.contiguous(), self.current.residual.contiguous()
        while True:
            evaluation += 1
            value, best = value_at(candidate), rows.best
            due = evaluation >= self.max_steps or evaluation % self.patience == 0
            moved = moves.take(
                candidate,
                value,
                None if due else before,
                solver.before(state)[1],
                best.relative,
                status,
            )
            self.trial = Point(candidate, moved.residual, moved.norm, moved.reference)
            if moved.following is None:
                return evaluation
            if running is None:
                best.replace(self.trial, moved.relative)
            else:
                best.update(running, self.trial, moved.relative)
            self.current = self.trial
            solver.stepped(state, self.trial)
            before, candidate = (candidate, moved.residual), moved.following
            del value, moved  # not needed while f makes the next one

    def _moves_from(self, z: Tensor) -> Moves | None:
        """C++ for the evaluations that follow z; None where a turn may need more than it knows."""
        plain = self.brief_account and not (self.recovering or self.snapshots.at)
        if not plain or not self.problem.lean_at(z):
            return None
        if self.moves is None:
            self.moves = self._new_moves(z)
        return self.moves if isinstance(self.moves, Moves) else None

    def _new_moves(self, like: Tensor) -> Moves | bool:
        """False where there is no C++ for these tensors and this solver."""
        steps = native_steps(like)
        if steps is None or _takes_own_step(type(self.solver)):
            return False
        ring = self.solver.ring(self.state)
        if ring is None:
            return False
        rtol, atol = (number(part, like) for part in (self.tolerance.rtol, self.tolerance.atol))
        low = MODERATE_ABOVE[like.dtype]
        return Moves(steps, ring, like, self.rows.limit.contiguous(), rtol, atol, low)

    def _step_by(self, moves: Moves, current: Point) -> Tensor:
        """The step in C++."""
        last, count = self.solver.before(self.state)
        before = None if last is None else (last.z.contiguous(), last.residual.contiguous())
        given = current.z.contiguous(), current.residual.contiguous()
        candidate = moves.step(*given, before, count)
        self.solver.stepped(self.state, current)
        return candidate

    def _shrink(self) -> None:
        """Let finished rows leave, their history with them, when enough of them have finished."""
        if not (self.some_ended and self.problem.compact and self.arrays.host):
            return
        ended = self.rows.status != RUNNING
        number = int(ended.sum())
        small = ended.numel() > FEW and fits_numpy(self.trial.z)
        if number * (SHRINK_SMALL if small else SHRINK) >= ended.numel() and number > 0:
            self._take_out(ended)

    @abstractmethod
    def _take_out(self, ended: Tensor) -> None:
        """Take the rows ``ended`` (n,) bool, not all of them, out of the working batch."""

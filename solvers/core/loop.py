"""What a solver is, and the loop behind :func:`solvers.fixed_point` that asks it for points.

A solver is a record of hyperparameters, with a state and functions on it. The loop evaluates, judges, lets
finished samples leave; a solver only proposes where to evaluate next::

    state = solver.init(point, problem)  # after the first evaluation
    candidate = solver.step(state, turn)  # after every evaluation

All vectors are (B, D) and every row is a problem of its own: a solver never mixes rows. Where a sample's
convergence is decided: :meth:`Loop._decide_status`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from solvers.core.device import maybe_any, readable
from solvers.core.layout import Layout
from solvers.core.modes import in_transform
from solvers.core.problem import Problem
from solvers.core.rows import (
    RUNNING,
    History,
    Point,
    Progress,
    Rows,
    Snapshots,
    best_of,
    gathering,
    merge_rows,
    select_rows,
    shrinks,
    where_rows,
)
from solvers.core.safeguard import MAX_REJECTIONS, Backtracking, Growth, acceptable, rounding
from solvers.core.solution import Solution, Status, Tolerance


class Rule:
    """A user's stopping rule, which is always asked about the whole batch."""

    def __init__(self, stop: Callable[[Any], Tensor], layout: Layout, start: Tensor) -> None:
        self.stop, self.layout, self.state = stop, layout, start.detach()

    def holds(self, index: Tensor, z: Tensor, taken: Tensor) -> Tensor:
        """(n,) bool: whether to stop the samples ``index`` (n,), of which ``taken`` have moved to z (n, D).

        Samples that have ended are shown where they ended.
        """
        batch, z = len(self.state), z.detach()
        if len(index) == batch:  # no sample has left
            self.state = where_rows(taken, z, self.state)
        else:
            moved = where_rows(taken, z, self.state[index])
            self.state = self.state.index_copy(0, index, moved)
        with torch.no_grad():
            answer = self.stop(self.layout.tree(self.state))
        if not isinstance(answer, Tensor) or answer.dtype != torch.bool or answer.shape != (batch,):
            got = f"{answer.dtype} {tuple(answer.shape)}" if isinstance(answer, Tensor) else answer
            raise TypeError(f"stop must return a bool tensor of shape ({batch},), got {got}")
        return answer[index] & taken


@dataclass
class Turn:
    """What a solver is told after an evaluation."""

    current: Point  # the last accepted point of every row
    trial: Point  # the point just evaluated; rejected rows may hold non-finite numbers
    accepted: Tensor | None  # (B,) bool, or None where every row was accepted
    rejections: Tensor  # (B,) consecutive rejections of the row, this one included
    problem: Problem  # of the rows that are left
    max_steps: int  # evaluations that a sample may spend in the whole solve


class Solver(ABC):
    """Base of all solvers; subclasses are frozen dataclasses of hyperparameters."""

    needs_energy: ClassVar[bool] = False  # a minimiser, which works with an energy only
    # The solver chooses the next trial of a rejected row itself (a line search); otherwise the loop
    # takes a shortened step along the residual.
    searches: ClassVar[bool] = False
    projects: ClassVar[bool] = (
        False  # its steps remain steps of descent when they are cut at bounds
    )
    lost: ClassVar[Status] = Status.NONFINITE  # status of a row whose trials were all not finite

    @abstractmethod
    def init(self, point: Point, problem: Problem) -> Any:
        """State record after the first evaluation."""

    @abstractmethod
    def step(self, state: Any, turn: Turn) -> Tensor:
        """Next point to evaluate, (B, D); ``state`` is the record made by ``init``, changed in place."""

    def products(self, state: Any) -> Tensor | None:
        """(B,) int64 evaluations made beside the loop's (products with the Jacobian), or None."""
        return None


class ExternalSolver(Solver):
    """A solver with a loop of its own; it reports what it did as a :class:`solvers.Solution`."""

    @abstractmethod
    def run(
        self,
        problem: Problem,
        start: Tensor,
        tolerance: Tolerance,
        max_steps: int,
        states_at: Sequence[int],
    ) -> Solution:
        """Solve from ``start`` (B, D); with ``states`` after these numbers of evaluations, if any."""

    def init(self, point: Point, problem: Problem) -> Any:
        raise TypeError(f"{type(self).__name__} has its own loop and cannot be stepped")

    def step(self, state: Any, turn: Turn) -> Tensor:
        raise TypeError(f"{type(self).__name__} has its own loop and cannot be stepped")


DIVERGENCE = 1e6  # largest residual, against the scale of the first evaluation
PATIENCE = 100  # evaluations without a better residual after which a sample has stalled


def keeps_failures_out() -> bool:
    """Whether a solve that autograd records drops samples whose first evaluation is not finite."""
    return readable() and torch.is_grad_enabled()


class Loop:
    """One solve, from its first evaluation ``start``; the :class:`Solution` has a value (B, D).

    Each turn judges the trial, updates the statuses, drops rows that have finished, and asks the solver for
    the next trial of every row. A row that accepts its trial moves there; a rejected row stays at its
    current point. Within a transform of ``torch.func`` nothing is decided by numbers: all evaluations are
    made.
    """

    def __init__(
        self,
        problem: Problem,
        start: Point,
        solver: Solver,
        tolerance: Tolerance,
        max_steps: int,
        record: bool = False,
        callback: Callable[[Progress], object] | None = None,
        states_at: Sequence[int] = (),
        rule: Rule | None = None,
    ) -> None:
        self.problem, self.solver, self.tolerance = problem, solver, tolerance
        self.max_steps, self.rule = max_steps, rule
        start = problem.exact(start)
        self.trial: Point = start  # the point evaluated last
        self.current: Point | None = None  # the last accepted point of every row
        self.accepted: Tensor | None = None  # (n,) bool, rows that accept the trial; None: all
        self.state: Any = None  # the solver's, which may be None for good
        self.started = False  # the state has been made
        self.rows = Rows.start(start, DIVERGENCE * torch.maximum(start.norm, start.reference))
        self.finished: list[Rows] = []  # of samples that have left the batch
        self.backtracking = Backtracking.start(start.norm)
        self.growth: Growth | None = None  # where an energy may be unbounded below
        if start.energy is not None:
            self.growth = Growth.start(start)
        self.history = History(len(start.norm), record, callback)
        self.snapshots = Snapshots(states_at, uneven=type(solver).products is not Solver.products)
        self.some_ended = False  # some row of the working batch has ended
        self.recovering = False  # some row was rejected at the last turn
        # With a rule, samples go on up to max_steps.
        self.patience = PATIENCE if rule is None else max_steps + 1
        self.guarded = True  # trials are judged by their energies, where there are any

    def run(self) -> Solution:
        """Go on until every sample has ended."""
        evaluation = 1
        while True:
            over = self._judge(evaluation)
            if self.snapshots.at:
                self.snapshots.note([*self.finished, self.rows], evaluation)
            if over:
                return self._solution()
            self.trial = self.problem.evaluate(self._propose())
            evaluation += 1

    def _judge(self, evaluation: int) -> bool:
        """Judge the trial and update every row by it; True when the solve is over."""
        self.trial = self.problem.exact(self.trial)
        accepted = acceptable(self.trial, self.current, self.rows.limit, self.guarded)
        self.accepted = accepted if maybe_any(~accepted) else None
        self._decide_status(evaluation)
        if self._all_ended() or evaluation == self.max_steps:
            return True
        if self.accepted is None or self.current is None:
            self.current = self.trial
        else:
            self.current = merge_rows(self.accepted, self.trial, self.current)
        if evaluation == 1 and keeps_failures_out():
            self._keep_failures_out()
        self._shrink()
        return False

    def _decide_status(self, evaluation: int) -> None:
        """Decide for every running row whether it has converged, failed or goes on.

        A row has converged where it accepts the trial and the trial meets the tolerance. The best
        iterate, the counts and the trace are updated on the way.
        """
        rows, trial, accepted = self.rows, self.trial, self.accepted
        running = rows.status == RUNNING
        taken = running if accepted is None else running & accepted
        relative, converged = trial.judged(taken, self.tolerance)
        if self.growth is not None:
            growing = self.growth.note(trial, taken)
            if growing is not None:
                # A residual of exactly 0 may be rounding where the energy grows without bound.
                small = (trial.norm > 0) & (trial.norm <= self.tolerance.atol)
                converged = converged & (small | ~growing)
        stopped = None if self.rule is None else self.rule.holds(rows.index, trial.z, taken)
        # A rule asks about the latest iterate, so this is also the one to return.
        better = (
            taken if stopped is not None else taken & (relative < rows.best.relative) | converged
        )
        rows.best.update(better, trial, relative)
        rows.evaluations = torch.where(running, evaluation + rows.products, rows.evaluations)
        if accepted is not None:
            rows.rejected = rows.rejected + (running & ~accepted)
        self.history.note(trial, accepted, rows, evaluation)
        status = torch.where(converged, int(Status.CONVERGED), rows.status)
        if accepted is not None:
            status = self._give_up(status, accepted, evaluation)
        over = (rows.evaluations >= self.max_steps) & (status == RUNNING)
        status = torch.where(over, int(Status.MAX_STEPS), status)
        if evaluation % self.patience == 0:
            status = self._find_stalled(status)
        if self.growth is not None and maybe_any(self.growth.lost):
            failed = self.growth.lost & running & (status > Status.CONVERGED)
            status = torch.where(failed, int(Status.DIVERGED), status)
        if stopped is not None:
            status = torch.where(stopped & ~converged, int(Status.STOPPED), status)
        rows.status = status

    def _find_stalled(self, status: Tensor) -> Tensor:
        """Rows with neither a better residual nor a lower energy since the last check have stalled."""
        rows = self.rows
        stuck = (rows.best.relative > 0.99 * rows.milestone) & (status == RUNNING)
        rows.milestone = rows.best.relative
        if self.guarded and self.trial.energy is not None:
            energy = self.trial.energy.detach()
            if self.accepted is not None:
                energy = torch.where(self.accepted, energy, rows.energy_milestone)
            fell = energy < rows.energy_milestone - rounding(energy)
            stuck = stuck & ~fell
            rows.energy_milestone = torch.minimum(energy, rows.energy_milestone)
        return torch.where(stuck, int(Status.STALLED), status)

    def _give_up(self, status: Tensor, accepted: Tensor, evaluation: int) -> Tensor:
        """Rows that were rejected too often, or whose fall-back step, too, leads far away.

        The very first point has nothing to fall back on.
        """
        trial, rejections = self.trial, self.backtracking.rejections
        rejected = ~accepted & (status == RUNNING)
        tried = MAX_REJECTIONS if evaluation > 1 else 0
        hopeless = rejected & (rejections >= tried)
        reason = torch.where(trial.finite(), int(Status.STALLED), int(self.solver.lost))
        status = torch.where(hopeless, reason, status)
        if self.guarded and trial.energy is not None:  # backtracking finds a short enough step
            return status
        diverged = rejected & (rejections > 0) & (trial.norm > self.rows.limit)
        return torch.where(diverged, int(Status.DIVERGED), status)

    def start_from(self, state: Any) -> None:
        """Let the solver go on from ``state`` instead of making its own."""
        self.state, self.started = state, True

    def _propose(self) -> Tensor:
        """The next point to evaluate (n, D)."""
        assert self.current is not None
        if not self.started:
            self.start_from(self.solver.init(self.current, self.problem))
        accepted = self.accepted
        if accepted is not None or self.recovering:
            self.backtracking.note(accepted)
        self.recovering = accepted is not None
        rejections = self.backtracking.rejections
        turn = Turn(self.current, self.trial, accepted, rejections, self.problem, self.max_steps)
        candidate = self.solver.step(self.state, turn)
        products = self.solver.products(self.state)
        if products is not None:
            running = self.rows.status == RUNNING
            self.rows.products = torch.where(running, products, self.rows.products)
        if accepted is not None and not self.solver.searches:
            shorter = self.backtracking.step(self.current, self.trial)
            candidate = where_rows(accepted, candidate, shorter)
        if in_transform():  # no sample leaves the batch: those that have ended stand still
            candidate = where_rows(self.rows.status == RUNNING, candidate, self.current.z)
        return self.problem.projected(candidate)

    def _all_ended(self) -> bool:
        if not readable():
            return False
        running = int((self.rows.status == RUNNING).sum())
        self.some_ended = running < len(self.rows.status)
        return running == 0

    def _keep_failures_out(self) -> None:
        """Evaluate anew without the rows that have no finite first evaluation.

        A recorded NaN of theirs would reach the gradients of weights that all rows share.
        """
        failed = self.rows.status == Status.NONFINITE
        if not self.problem.compact or not bool(failed.any()):
            return
        ended = self.rows.status != RUNNING
        self._take_out(ended)
        self.trial = self.current = self.problem.evaluate(self.trial.z)

    def _shrink(self) -> None:
        """Let finished rows leave, their history with them, when enough of them have finished."""
        if not (self.some_ended and self.problem.compact):
            return
        ended = self.rows.status != RUNNING
        # Where rows make evaluations of their own, a finished row must not make more.
        if self.snapshots.uneven or shrinks(self.rows.status, self.trial.z):
            self._take_out(ended)

    def _take_out(self, ended: Tensor) -> None:
        """Take the rows ``ended`` (n,) bool, not all of them, out of the working batch."""
        self.some_ended = False
        stay = torch.nonzero(~ended).flatten()
        self.finished.append(select_rows(self.rows, torch.nonzero(ended).flatten()))
        self.rows = select_rows(self.rows, stay)
        self.backtracking = select_rows(self.backtracking, stay)
        if self.growth is not None:
            self.growth = select_rows(self.growth, stay)
        self.problem = self.problem.rows(stay, ended.numel())
        taken = self.trial is self.current
        self.trial = select_rows(self.trial, stay)
        self.current = self.trial if taken else select_rows(self.current, stay)
        if self.accepted is not None:
            self.accepted = self.accepted.index_select(0, stay)
        if self.state is not None:
            self.state = select_rows(self.state, stay)

    def _solution(self) -> Solution:
        """Gather the rows in the caller's order."""
        parts = [*self.finished, self.rows]
        gather = gathering(parts)
        best = best_of(parts, gather)
        evaluations = gather(lambda part: part.evaluations)
        others = gather(lambda part: part.products + part.rejected)
        return Solution(
            value=best.value,
            status=gather(lambda part: part.status),
            residual=best.relative,
            residual_norm=best.norm,
            steps=evaluations - others,
            evaluations=evaluations,
            energy=best.energy,
            trace=self.history.trace(),
            states=self.snapshots.states(best),
        )

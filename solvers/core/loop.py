"""What a solver is, and the loop behind :func:`solvers.fixed_point` that asks it for points.

A solver is a record of hyperparameters, with a state and functions on it. The loop evaluates, judges, lets
finished samples leave; a solver only proposes where to evaluate next::

    state = solver.init(point, problem)  # after the first evaluation
    candidate = solver.step(state, inputs)  # after every evaluation

All vectors are (B, D) and every row is a problem of its own: a solver never mixes rows. Where a sample's
convergence is decided: :meth:`Loop._decide_status`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from solvers.core.problem import Problem
from solvers.core.rows import (
    RUNNING,
    Best,
    Evaluation,
    Progress,
    Rows,
    gather_rows,
    merge_rows,
    scatter_rows,
    select_rows,
    shrinks,
    where_rows,
)
from solvers.core.safeguard import (
    MAX_REJECTIONS,
    Growth,
    acceptable,
    count_rejections,
    fallback_step,
    rounding,
)
from solvers.core.solution import Solution, Status, Tolerance, Trace


@dataclass(frozen=True)
class Options:
    """What the loop is asked for: when to stop, and what to note on the way."""

    tolerance: Tolerance
    max_steps: int
    record: bool = False
    callback: Callable[[Progress], object] | None = None
    states_at: tuple[int, ...] = ()
    stop: Callable[[Any], Tensor] | None = None  # of the states of all samples

    @property
    def watched(self) -> bool:
        """Whether more is asked for than a solution."""
        return bool(self.record or self.callback or self.states_at or self.stop)


@dataclass
class SolverInput:
    """What a solver is told after an evaluation."""

    current: Evaluation  # the last accepted point of every row
    trial: Evaluation  # the point just evaluated; rejected rows may hold non-finite numbers
    accepted: Tensor | None  # (B,) bool, or None where every row was accepted
    rows: Rows
    problem: Problem  # of the rows that are left
    max_steps: int  # evaluations that a sample may spend in the whole solve
    # The solver's answer: (B,) evaluations that it has made itself (products with the Jacobian), if any.
    products: Tensor | None = None

    @property
    def left(self) -> Tensor:
        """(B,) evaluations that each row may still spend."""
        running = self.rows.status == RUNNING
        return torch.where(running, self.max_steps - self.rows.evaluations, 0)


class Solver(ABC):
    """Base of all solvers; subclasses are frozen dataclasses of hyperparameters."""

    needs_energy: ClassVar[bool] = False  # a minimiser, which works with an energy only
    # The solver chooses the next trial of a rejected row itself (a line search); otherwise the loop
    # takes a shortened step along the residual.
    searches: ClassVar[bool] = False
    failed: ClassVar[Status] = Status.NONFINITE  # status of a row whose trials were all not finite

    @abstractmethod
    def init(self, point: Evaluation, problem: Problem) -> Any:
        """State record after the first evaluation."""

    @abstractmethod
    def step(self, state: Any, inputs: SolverInput) -> Tensor:
        """Next point to evaluate, (B, D); ``state`` is the record made by ``init``, changed in place."""


class ExternalSolver(Solver):
    """A solver with a loop of its own; it reports what it did as a :class:`solvers.Solution`."""

    @abstractmethod
    def run(self, problem: Problem, start: Tensor, options: Options) -> Solution:
        """Solve from ``start`` (B, D), noting the states that are asked for and nothing else."""

    def init(self, point: Evaluation, problem: Problem) -> Any:
        raise TypeError(f"{type(self).__name__} has its own loop and cannot be stepped")

    def step(self, state: Any, inputs: SolverInput) -> Tensor:
        raise TypeError(f"{type(self).__name__} has its own loop and cannot be stepped")


DIVERGENCE = 1e6  # largest residual, against the scale of the first evaluation
PATIENCE = 100  # evaluations without a better residual after which a sample has stalled
NOISE = 16  # energy differences below this multiple of the rounding error are insignificant


class Loop:
    """One solve, from its first evaluation ``first``; the :class:`Solution` has a value (B, D).

    Each turn judges the trial, updates the statuses, drops rows that have finished, and asks the solver for
    the next trial of every row. A row that accepts its trial moves there; a rejected row stays at its
    current point. Within a transform of ``torch.func`` nothing is decided by numbers: all evaluations are
    made.
    """

    def __init__(
        self, problem: Problem, first: Evaluation, solver: Solver, options: Options
    ) -> None:
        self.problem, self.solver, self.options = problem, solver, options
        self.trial: Evaluation = first  # the point evaluated last
        self.current: Evaluation | None = None  # the last accepted point of every row
        self.accepted: Tensor | None = None  # (n,) bool, rows that accept the trial; None: all
        self.state: Any = None  # the solver's, which may be None for good
        self.finished: list[Rows] = []  # of samples that have left the batch
        self.recovering = False  # some row was rejected at the last turn
        # Where an energy may be unbounded below.
        self.growth = None if first.energy is None else Growth.start(first)
        energy = None if first.energy is None else torch.full_like(first.energy, torch.nan)
        infinite = torch.full_like(first.norm, torch.inf)
        status = torch.full_like(first.norm, RUNNING, dtype=torch.int64)
        self.rows = Rows.start(Best(first.z, infinite, infinite, energy), status)
        self.rows.limit = DIVERGENCE * torch.maximum(first.norm, first.reference)
        self.trace: Trace | None = None
        self.states: dict[int, Best] = {}  # of all samples, after numbers of evaluations
        # With a rule to stop, samples go on up to max_steps.
        self.patience = PATIENCE if options.stop is None else options.max_steps + 1
        self.latest = first.z.detach()  # states of all samples of the caller, for the rule
        self.uneven = False  # rows may have made different numbers of evaluations

    def resume(self, solution: Solution, index: Tensor, failed: Tensor) -> None:
        """Solve the samples ``index`` (n,) of ``solution`` that have ``failed`` (n,) bool from their values.

        They go on counting their evaluations. An iterate at a higher energy is never a better one.
        """
        energy, spent = solution.energy, solution.evaluations
        best = Best(solution.value, solution.residual, solution.residual_norm, energy)
        # In a batch that stays whole each sample has been in all evaluations.
        before = spent if self.problem.compact else spent.max().expand_as(spent)
        whole = replace(
            Rows.start(best, solution.status),
            steps=solution.steps,
            evaluations=spent,
            before=before,
            products=before,
            ceiling=None if energy is None else energy + NOISE * rounding(energy),
        )
        others = torch.ones_like(spent, dtype=torch.bool).index_fill(0, index, False)
        self.finished = [select_rows(whole, torch.nonzero(others).flatten())]
        limit, self.rows = self.rows.limit, select_rows(whole, index)
        self.rows.status, self.rows.limit = self.rows.status.where(~failed, RUNNING), limit
        self.latest, self.trace = solution.value, solution.trace
        self.states = dict(zip(self.options.states_at, solution.states or (), strict=True))
        self.uneven = True

    def run(self) -> Solution:
        """Go on until every sample has ended."""
        count = 1
        while True:
            over = self._judge(count)
            self._note_states(count)
            if over:
                return self._solution()
            self.trial = self.problem.evaluate(self._propose(count))
            count += 1

    def _judge(self, count: int) -> bool:
        """Judge the trial and update every row by it; True when the solve is over."""
        traced, ceiling = self.problem.traced, self.rows.ceiling
        accepted = acceptable(self.trial, self.current, self.rows.limit, ceiling is None)
        self.accepted = accepted if traced or not bool(accepted.all()) else None
        self._decide_status(count)
        running = self.rows.status == RUNNING
        number = len(running) if traced else int(running.sum())
        if number == 0 or count == self.options.max_steps:
            return True
        if self.accepted is None or self.current is None:
            self.current = self.trial
        else:
            self.current = merge_rows(self.accepted, self.trial, self.current)
        if number < len(running) and self.problem.compact:
            unrolled = count == 1 and torch.is_grad_enabled()
            failed = unrolled and bool((self.rows.status == Status.NONFINITE).any())
            # Where rows make evaluations of their own, a finished row must not make more.
            if failed or self.uneven or shrinks(self.rows.status, self.trial.z):
                self._take_out(~running)
            if failed:
                # A recorded NaN would reach the gradients of weights that all rows share.
                self.trial = self.current = self.problem.evaluate(self.trial.z)
        return False

    def _decide_status(self, count: int) -> None:
        """Decide for every running row whether it has converged, failed or goes on.

        A row has converged where it accepts the trial and the trial meets the tolerance. The best
        iterate, the counts and the trace are updated on the way.
        """
        rows, trial, accepted, options = self.rows, self.trial, self.accepted, self.options
        running = rows.status == RUNNING
        taken = running if accepted is None else running & accepted
        lower = taken
        if rows.ceiling is not None and trial.energy is not None:
            lower = taken & (trial.energy <= rows.ceiling)
        relative, converged = trial.judged(lower, options.tolerance)
        if self.growth is not None:
            growing = self.growth.note(trial, taken)
            if growing is not None:
                # A residual of exactly 0 may be rounding where the energy grows without bound.
                small = (trial.norm > 0) & (trial.norm <= options.tolerance.atol)
                converged = converged & (small | ~growing)
        stopped, better = None, lower & (relative < rows.best.relative) | converged
        if options.stop is not None:
            stopped = self._stops(options.stop, taken)
            better = taken  # the rule asks about the latest iterate, so this is the one to return
        every = not self.problem.traced and bool(better.all())
        rows.best = rows.best.updated(better, trial, relative, every=every)
        rows.evaluations, rows.steps = rows.at(count), rows.steps + taken
        self._note(count)
        status = torch.where(converged, int(Status.CONVERGED), rows.status)
        if accepted is not None:
            status = self._give_up(status, accepted, count)
        over = (rows.evaluations >= options.max_steps) & (status == RUNNING)
        status = torch.where(over, int(Status.MAX_STEPS), status)
        if count % self.patience == 0:
            status = self._find_stalled(status)
        if self.growth is not None and bool(self.growth.diverging.any()):
            failed = self.growth.diverging & running & (status > Status.CONVERGED)
            status = torch.where(failed, int(Status.DIVERGED), status)
        if stopped is not None:
            status = torch.where(stopped & ~converged, int(Status.STOPPED), status)
        rows.status = status

    def _stops(self, stop: Callable[[Any], Tensor], taken: Tensor) -> Tensor:
        """(n,) bool: rows to stop of those that have ``taken`` (n,) the trial.

        The rule is always asked about the whole batch. Samples that have ended are shown where they ended.
        """
        index, z = self.rows.index, self.trial.z.detach()
        moved = where_rows(taken, z, self.latest[index])
        self.latest = self.latest.index_copy(0, index, moved)
        with torch.no_grad():
            answer = stop(self.problem.layout.tree(self.latest))
        shape = (len(self.latest),)
        if not isinstance(answer, Tensor) or answer.dtype != torch.bool or answer.shape != shape:
            got = f"{answer.dtype} {tuple(answer.shape)}" if isinstance(answer, Tensor) else answer
            raise TypeError(f"stop must return a bool tensor of shape {shape}, got {got}")
        return answer[index] & taken

    def _find_stalled(self, status: Tensor) -> Tensor:
        """Rows with neither a better residual nor a lower energy since the last check have stalled."""
        rows = self.rows
        stuck = (rows.best.relative > 0.99 * rows.milestone) & (status == RUNNING)
        rows.milestone = rows.best.relative
        if rows.ceiling is None and self.trial.energy is not None:
            energy = self.trial.energy.detach()
            if self.accepted is not None:
                energy = torch.where(self.accepted, energy, rows.energy_milestone)
            fell = energy < rows.energy_milestone - rounding(energy)
            stuck = stuck & ~fell
            rows.energy_milestone = torch.minimum(energy, rows.energy_milestone)
        return torch.where(stuck, int(Status.STALLED), status)

    def _give_up(self, status: Tensor, accepted: Tensor, count: int) -> Tensor:
        """Rows that were rejected too often, or whose fall-back step, too, leads far away.

        The very first point has nothing to fall back on.
        """
        trial, rejections = self.trial, self.rows.rejections
        rejected = ~accepted & (status == RUNNING)
        tried = MAX_REJECTIONS if count > 1 else 0
        hopeless = rejected & (rejections >= tried)
        reason = torch.where(trial.finite(), int(Status.STALLED), int(self.solver.failed))
        status = torch.where(hopeless, reason, status)
        if self.rows.ceiling is None and trial.energy is not None:
            return status  # backtracking finds a short enough step
        diverged = rejected & (rejections > 0) & (trial.norm > self.rows.limit)
        return torch.where(diverged, int(Status.DIVERGED), status)

    def _propose(self, count: int) -> Tensor:
        """The next point to evaluate (n, D), after so many turns."""
        assert self.current is not None
        if self.state is None:
            self.state = self.solver.init(self.current, self.problem)
        rows, accepted = self.rows, self.accepted
        if accepted is not None or self.recovering:
            count_rejections(rows, accepted)
        self.recovering = accepted is not None
        problem, most = self.problem, self.options.max_steps
        inputs = SolverInput(self.current, self.trial, accepted, rows, problem, most)
        candidate = self.solver.step(self.state, inputs)
        if inputs.products is not None:
            if not self.uneven:  # from now on a row may pass by a number of evaluations
                self.uneven = True
                self._note_states(count)
            rows.products = rows.products + inputs.products * (rows.status == RUNNING)
        if accepted is not None and not self.solver.searches:
            shorter = fallback_step(rows, self.current, self.trial)
            candidate = where_rows(accepted, candidate, shorter)
        if problem.traced:  # no sample leaves the batch: those that have ended stand still
            candidate = where_rows(rows.status == RUNNING, candidate, self.current.z)
        return problem.projected(candidate)

    def _take_out(self, ended: Tensor) -> None:
        """Take the rows ``ended`` (n,) bool, not all of them, out of the working batch."""
        stay = torch.nonzero(~ended).flatten()
        self.finished.append(select_rows(self.rows, torch.nonzero(ended).flatten()))
        self.problem = self.problem.rows(stay, ended.numel())
        taken = self.trial is self.current
        names = ("rows", "growth", "trial", "current", "accepted", "state")
        for name in names:
            setattr(self, name, select_rows(getattr(self, name), stay))
        self.current = self.trial if taken else self.current

    def _note_states(self, count: int) -> None:
        """Note the best iterates of the samples that have made at most so many evaluations.

        A sample that has ended keeps its last one. The residual is infinite where there is none. Unless rows
        are uneven, all have made ``count`` evaluations, and there is nothing to note for larger numbers yet.
        """
        numbers = self.options.states_at
        numbers = [n for n in numbers if n == count or (n > count and self.uneven)]
        if not numbers:
            return
        whole = gather_rows([*self.finished, self.rows])
        spent, infinite = whole.at(count), torch.full_like(whole.best.relative, torch.inf)
        for number in numbers:
            known = self.states.get(number, replace(whole.best, relative=infinite))
            self.states[number] = merge_rows(spent <= number, whole.best, known)

    def _solution(self) -> Solution:
        """Gather the rows in the caller's order."""
        rows, at = gather_rows([*self.finished, self.rows]), self.options.states_at
        return Solution(
            value=rows.best.value,
            status=rows.status,
            residual=rows.best.relative,
            residual_norm=rows.best.norm,
            steps=rows.steps,
            evaluations=rows.evaluations,
            energy=rows.best.energy,
            trace=self.trace,
            states=[replace(self.states.get(number, rows.best)) for number in at] or None,
        )

    def _note(self, count: int) -> None:
        """Note the trial of the running rows in the trace and tell the callback."""
        rows, trial, accepted, options = self.rows, self.trial, self.accepted, self.options
        if not (options.record or options.callback):
            return
        running = rows.status == RUNNING
        index, columns = rows.index[running], rows.before[running] + count - 1
        residual = trial.relative().detach()[running]
        energy = None if trial.energy is None else trial.energy.detach()[running]

        def written(whole: Tensor | None, values: Tensor, fill: float) -> Tensor:
            whole = values.new_empty(len(self.latest), 0) if whole is None else whole
            extra = max(0, int(columns.max()) + 1 - whole.shape[1])
            whole = pad(whole, (0, extra), value=fill)
            whole[index, columns] = values
            return whole

        if options.record:
            taken = torch.ones_like(index, dtype=torch.bool)
            taken = taken if accepted is None else accepted[running]
            old = self.trace or Trace(None)  # type: ignore[arg-type]
            self.trace = Trace(
                written(old.residual, residual, torch.nan),
                None if energy is None else written(old.energy, energy, torch.nan),
                written(old.accepted, taken, False),
            )
        if options.callback is not None:
            number = min(int(columns.max()) + 1, options.max_steps)
            residual = scatter_rows(residual, index, len(self.latest), torch.nan)
            if energy is not None:
                energy = scatter_rows(energy, index, len(self.latest), torch.nan)
            options.callback(Progress(number, residual, energy, len(index)))

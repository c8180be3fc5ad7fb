"""What a solver is, and the loop behind :func:`solvers.fixed_point` that asks it for points.

A solver is a record of hyperparameters, with a state and functions on it. The loop evaluates, judges, lets
finished samples leave; a solver only proposes where to evaluate next::

    state = solver.init(point, problem)  # after the first evaluation
    candidate = solver.step(state, inputs)  # after every evaluation

All vectors are (B, D) and every row is a problem of its own: a solver never mixes rows. Where a sample's
convergence is decided: :meth:`solvers.core.judge.Rule.converged`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from solvers.core.judge import Rule, relative_error, span_factor, stiffness
from solvers.core.problem import Problem
from solvers.core.rows import (
    RUNNING,
    STEPS,
    Best,
    Evaluation,
    Progress,
    Rows,
    join_rows,
    merge_rows,
    put_rows,
    scaled_norm,
    scatter_rows,
    select_rows,
    should_shrink,
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
from solvers.core.solution import Solution, Status, Trace
from solvers.core.tolerance import Tolerance


@dataclass(frozen=True)
class Options:
    """What the loop is asked for: when to stop, and what to note on the way."""

    tolerance: Tolerance
    max_steps: int
    record: bool = False
    callback: Callable[[Progress], object] | None = None
    stop: Callable[..., Tensor] | None = None  # of the states of all samples
    by_row: bool = False  # ... of those in the working batch, and their arguments
    precision: torch.dtype | None = None  # in which f computes; None for that of the state

    @property
    def watched(self) -> bool:
        """Whether more is asked for than a solution."""
        return bool(self.record or self.callback or self.stop)

    @property
    def patience(self) -> int:
        """Evaluations without progress after which a sample has stalled; with ``stop`` none ever does."""
        patience = self.tolerance.patience
        return self.max_steps + 1 if patience is None or self.stop is not None else patience

    def rule(self, problem: Problem, first: Evaluation) -> Rule:
        """When a sample has converged."""
        kinds = {self.precision or first.z.dtype, *problem.layout.dtypes}
        eps = max([torch.finfo(kind).eps for kind in kinds])
        return Rule(self.tolerance, eps, problem.unit_free)


@dataclass
class SolverInput:
    """What a solver is told after an evaluation."""

    current: Evaluation  # the last accepted point of every row
    trial: Evaluation  # the point just evaluated; rejected rows may hold non-finite numbers
    accepted: Tensor | None  # (B,) bool, or None where every row was accepted
    rows: Rows
    problem: Problem  # of the rows that are left
    max_steps: int  # evaluations that a sample may spend in the whole solve
    # The solver's answer: (B,) the gain |s| / |r| of the full step s where r is known, of which a line search
    # may leave a part, if that is to count;
    gain: Tensor | None = None
    # (B,) evaluations that it has made itself (products with the Jacobian), if any.
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
    # Without an energy, an accelerated point is accepted if its residual is at most the largest of so many
    # points accepted last; 0: without a limit.
    window: ClassVar[int] = 0
    plain: ClassVar[bool] = False  # every step is a multiple of the residual
    known: ClassVar[int] = 2  # steps of a map after which its gains show the error
    failed: ClassVar[Status] = Status.NONFINITE  # status of a row whose trials were all not finite

    @abstractmethod
    def init(self, point: Evaluation, problem: Problem) -> Any:
        """State record after the first evaluation."""

    @abstractmethod
    def step(self, state: Any, inputs: SolverInput) -> Tensor:
        """Next point to evaluate, (B, D); ``state`` is the record made by ``init``, changed in place."""

    def pairs(self, state: Any, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Steps dz and changes dr of the residual before the newest, (k, m, D) of the ``rows`` (k,).

        None: they are not kept.

        A common factor of a step and its change does not count, except for its sign. They sharpen the
        estimated error (``judge.span_factor``).
        """
        return None

    def renew(self, state: Any, places: Tensor, point: Evaluation) -> None:
        """Begin anew in the rows ``places`` (n,), whose first evaluation is in ``point``.

        Called before :meth:`step`. Solvers without it cannot refill the rows of a queue.
        """
        raise NotImplementedError


class ExternalSolver(Solver):
    """A solver with a loop of its own; it reports what it did as a :class:`solvers.Solution`."""

    @abstractmethod
    def run(self, problem: Problem, start: Tensor, options: Options) -> Solution:
        """Solve from ``start`` (B, D)."""

    def init(self, point: Evaluation, problem: Problem) -> Any:
        raise TypeError(f"{type(self).__name__} has its own loop and cannot be stepped")

    def step(self, state: Any, inputs: SolverInput) -> Tensor:
        raise TypeError(f"{type(self).__name__} has its own loop and cannot be stepped")


DIVERGENCE = 1e6  # largest residual, against the scale of the first evaluation
# Share by which the best residual must fall within the patience of the tolerance,
PROGRESS = 1e-3
DRIFT = 0.5  # unless the sample has come as far as this share of the length of its path


class Loop:
    """One solve, from its first evaluation ``first``; the :class:`Solution` has a value (B, D).

    Each turn judges the trial, updates the statuses, drops rows that have finished, and asks the solver for
    the next trial of every row. A row that accepts its trial moves there; a rejected row stays at its
    current point. ``spent`` (B,) are evaluations that each sample has made before.

    With ``refilled`` the caller takes out rows that have ended (:meth:`keep`) and replaces them by new
    samples (:meth:`put`); until then they wait at their best iterates.
    """

    def __init__(
        self, problem: Problem, first: Evaluation, solver: Solver, options: Options,
        spent: Tensor | None = None, *, refilled: bool = False,
    ) -> None:  # fmt: skip
        self.problem, self.solver, self.options = problem, solver, options
        self.refilled = refilled
        self.count = 0  # turns
        self.next = first.z  # the points to evaluate next
        self.entered: Tensor | None = None  # rows with new samples, which the next turn begins
        self.rule = options.rule(problem, first)
        self.trial: Evaluation = first  # the point evaluated last
        self.current: Evaluation | None = None  # the last accepted point of every row
        self.last: Evaluation | None = None  # the accepted point before the trial
        self.accepted: Tensor | None = None  # (n,) bool, rows that accept the trial; None: all
        self.state: Any = None  # the solver's, which may be None for good
        self.finished: list[Rows] = []  # of samples that have left the batch
        self.recovering = False  # some row was rejected at the last turn
        # Where an energy may be unbounded below.
        self.growth = None if first.energy is None else Growth.start(first)
        self.rows = _start(first, self.rule, solver.window, spent)
        self.trace: Trace | None = None
        self.latest = first.z.detach()  # states of all samples of the caller, for rule and callback
        self.uneven = spent is not None  # rows may have made different numbers of evaluations

    def run(self) -> Solution:
        """Go on until every sample has ended."""
        while self.move():
            self.evaluate()
        return self.solution()

    def evaluate(self) -> None:
        """Evaluate the map at the next points."""
        self.trial = self.problem.evaluate(self.next)

    def move(self) -> int:
        """Judge the trial, and find the next point of every row; return how many rows go on."""
        self.count += 1
        if self.entered is not None:
            self._begin(self.entered)
        running = self._process_trial(self.count)
        if running or self.refilled:
            self.next = self._propose()
        if self.refilled and running < len(self.next):
            waits = self.rows.status != RUNNING
            self.next = where_rows(waits, self.rows.best.value, self.next)
        return running

    def put(self, places: Tensor, z: Tensor) -> None:
        """Replace the samples in the rows ``places`` (n,) by new ones that start at ``z`` (n, D)."""
        self.next = self.next.index_copy(0, places, z)
        self.rows.status = self.rows.status.index_fill(0, places, RUNNING)
        self.entered = places if self.entered is None else torch.cat((self.entered, places))

    def _begin(self, places: Tensor) -> None:
        """Begin anew in the rows ``places``, where the trial is the first evaluation."""
        assert self.current is not None
        trial, self.entered = self.trial, None
        before = torch.full_like(self.rows.evaluations, 1 - self.count)
        new = _start(trial, self.rule, self.solver.window, before)
        self.rows = put_rows(self.rows, new, places)
        self.current = put_rows(self.current, trial, places)
        if self.growth is not None:
            self.growth = put_rows(self.growth, Growth.start(trial), places)
        self.solver.renew(self.state, places, trial)

    def _process_trial(self, count: int) -> int:
        """Judge the trial and update every row by it; return how many rows go on."""
        rows = self.rows
        accepted = acceptable(self.trial, self.current, rows.limit)
        if self.solver.window and count > 2 and self.trial.energy is None:
            # A plain step, which follows a rejection, is accepted whatever its residual.
            free = (self.trial.norm <= rows.recent_norms.amax(1)) | (rows.rejections > 0)
            accepted = accepted & (free | (rows.at(count) <= 2) if self.refilled else free)
        if self.refilled:  # rows that wait do not hold up the others
            accepted = accepted | (rows.status != RUNNING)
        self.accepted = None if bool(accepted.all()) else accepted
        self._move(count)
        self._decide_status(count)
        running = self.rows.status == RUNNING
        number = int(running.sum())
        if 0 < number < len(running) and self.problem.compact and not self.refilled:
            unrolled = count == 1 and torch.is_grad_enabled()
            failed = unrolled and bool((self.rows.status == Status.NONFINITE).any())
            # Where rows make evaluations of their own, a finished row must not make more.
            if failed or self.uneven or should_shrink(self.rows.status, self.trial.z):
                ended = torch.nonzero(~running).flatten()
                self.finished.append(select_rows(self.rows, ended))
                self.keep(torch.nonzero(running).flatten())
            if failed:
                # A recorded NaN would reach the gradients of weights that all rows share.
                self.trial = self.current = self.problem.evaluate(self.trial.z)
        return number

    def _move(self, count: int) -> None:
        """Move the rows that accept the trial there, and remember the gains of their steps."""
        rows, trial, accepted, last = self.rows, self.trial, self.accepted, self.current
        self.last = last
        if last is not None:
            moved, changed = trial.difference(last)
            again = (rows.rejections > 0)[:, None] & (self.solver.window > 0)
            plain: Any = self.solver.plain or again
            gain, known = self.rule.gain(trial, last.norms, moved, changed, plain)
            known = known if accepted is None else known & accepted[:, None]
            slot = count % STEPS
            rows.gains[:, :, slot] = torch.where(known, gain, rows.gains[:, :, slot])
            rows.path = rows.path + moved.where(known, 0.0).sum(1)
            caps = self.rule.grown(trial, rows.caps, rows.limit / DIVERGENCE)
            rows.caps = caps if accepted is None else where_rows(accepted, caps, rows.caps)
        if accepted is None or last is None:
            self.current = trial
        else:
            self.current = merge_rows(accepted, trial, last)
        if self.solver.window:
            rows.recent_norms[:, count % self.solver.window] = self.current.norm

    def _decide_status(self, count: int) -> None:
        """Decide for every running row whether it has converged, failed or goes on.

        A row has converged where it accepts the trial and the trial meets the tolerance. The best
        iterate, the counts and the trace are updated on the way.
        """
        rows, trial, accepted, options = self.rows, self.trial, self.accepted, self.options
        running = rows.status == RUNNING
        taken = running if accepted is None else running & accepted
        score = self.rule.score(trial, rows.caps)
        error = self.rule.error(trial, rows.gains, self.solver.known)
        near, converged = self._judge(taken, error)
        if count > STEPS:
            factor = self._factor(converged & (rows.at(count) > STEPS))
            if factor is not None:
                error = error * factor[:, None]
                near, converged = self._judge(taken, error)
        rows.near = torch.where(taken, near, rows.near)
        if self.growth is not None:
            growing = self.growth.note(trial, taken)
            if growing is not None:
                # A residual of exactly 0 may be rounding where the energy grows without bound.
                small = (trial.norm > 0) & (trial.norm <= options.tolerance.atol)
                converged = converged & (small | ~growing)
        stopped, better = None, taken & (score < rows.best.score) | converged
        if not options.by_row and (options.stop is not None or options.callback is not None):
            index, z = rows.index, trial.z.detach()
            moved = where_rows(taken, z, self.latest[index])
            self.latest = self.latest.index_copy(0, index, moved)
        if options.stop is not None:
            stopped = self._stops(options.stop) & taken
            better = taken  # the rule asks about the latest iterate, so this is the one to return
        new = _candidate(trial, score, error)
        rows.best = new if bool(better.all()) else merge_rows(better, new, rows.best)
        rows.evaluations, rows.steps = rows.at(count), rows.steps + taken
        self._note(count)
        status = torch.where(converged, int(Status.CONVERGED), rows.status)
        if accepted is not None:
            status = self._give_up(status, accepted, count)
        over = (rows.evaluations >= options.max_steps) & (status == RUNNING)
        status = torch.where(over, int(Status.MAX_STEPS), status)
        if self.refilled:
            due = rows.evaluations % options.patience == 0
            status = self._find_stalled(status, due) if bool(due.any()) else status
        elif count % options.patience == 0:
            status = self._find_stalled(status, torch.ones_like(running))
        if self.growth is not None and bool(self.growth.diverging.any()):
            failed = self.growth.diverging & running & (status > Status.CONVERGED)
            status = torch.where(failed, int(Status.DIVERGED), status)
        if stopped is not None:
            status = torch.where(stopped & ~converged, int(Status.STOPPED), status)
        if self.rule.unit_free and trial.energy is not None and options.stop is None:
            over = (status == Status.MAX_STEPS) | (status == Status.STALLED)
            self._take_lowest(running & over)
        rows.status = status

    def _judge(self, taken: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) bool: rows where the errors (n, L) of the trial are small, and rows that have converged."""
        rows, trial = self.rows, self.trial
        near = self.rule.room(trial, rows.caps, error, rows.limit) >= 1
        met = self.rule.converged(trial, rows.caps, near, rows.near, rows.gains)
        return near, taken & met

    def _factor(self, converged: Tensor) -> Tensor | None:
        """(n,) factors on the error, those of the span of their steps for the ``converged`` rows."""
        index = torch.nonzero(converged).flatten()
        pairs = self.solver.pairs(self.state, index) if index.numel() else None
        if pairs is None or self.last is None:
            return None
        moved, changed = (
            getattr(self.trial, name).detach()[index] - getattr(self.last, name).detach()[index]
            for name in ("z", "residual")
        )
        newest = moved[:, None], changed[:, None]
        steps, changes = (torch.cat(both, 1) for both in zip(pairs, newest, strict=True))
        factor = span_factor(steps, changes).to(self.rows.gains.dtype)
        return torch.ones_like(self.rows.limit).index_copy(0, index, factor)

    def _take_lowest(self, ended: Tensor) -> None:
        """Let rows (n,) bool that end before a minimum return the last accepted point: the lowest energy.

        The one with the smallest gradient may lie far above it, or be the start. It is kept where both
        energies agree to rounding, because it is then nearer to a minimum.
        """
        rows, point = self.rows, self.current
        if point is None or not bool(ended.any()):
            return
        error = self.rule.error(point, rows.gains, self.solver.known)
        last = _candidate(point, self.rule.score(point, rows.caps), error)
        assert last.energy is not None and rows.best.energy is not None
        higher = rows.best.energy > last.energy + rounding(last.energy)
        rows.best = merge_rows(ended & higher, last, rows.best)

    def _stops(self, stop: Callable[..., Tensor]) -> Tensor:
        """(n,) bool: rows of which the rule says that they stop.

        The rule is asked about the whole batch, with samples that have ended where they ended, or about the
        rows and their arguments.
        """
        by_row, current = self.options.by_row, self.current
        z = current.z.detach() if by_row and current is not None else self.latest
        with torch.no_grad():
            answer = stop(self.problem.layout.tree(z), *(self.problem.shown if by_row else ()))
        shape = (len(z),)
        if not isinstance(answer, Tensor) or answer.dtype != torch.bool or answer.shape != shape:
            got = f"{answer.dtype} {tuple(answer.shape)}" if isinstance(answer, Tensor) else answer
            raise TypeError(f"stop must return a bool tensor of shape {shape}, got {got}")
        return answer if by_row else answer[self.rows.index]

    def _find_stalled(self, status: Tensor, due: Tensor) -> Tensor:
        """Rows that are ``due`` (n,) bool and have come no further since their last check have stalled.

        Neither their residual nor their energy has fallen, and their iterates do not keep to a direction.
        """
        rows = self.rows
        assert self.current is not None
        z = self.current.z.detach()
        stuck = (rows.best.score > (1 - PROGRESS) * rows.milestone) & (status == RUNNING) & due
        if rows.anchor is not None:
            stuck = stuck & ~(scaled_norm(z - rows.anchor) > DRIFT * rows.path)
        rows.milestone = torch.where(due, rows.best.score, rows.milestone)
        rows.anchor = z if rows.anchor is None else where_rows(due, z, rows.anchor)
        rows.path = rows.path.masked_fill(due, 0)
        if self.current.energy is not None:
            energy, lowest = self.current.energy.detach(), rows.energy_milestone
            stuck = stuck & ~(energy < lowest - rounding(energy))
            rows.energy_milestone = torch.where(due, torch.minimum(energy, lowest), lowest)
        return torch.where(stuck, int(Status.STALLED), status)

    def _give_up(self, status: Tensor, accepted: Tensor, count: int) -> Tensor:
        """Rows that were rejected too often, or whose fall-back step, too, leads far away.

        The very first point has nothing to fall back on.
        """
        trial, rejections = self.trial, self.rows.rejections
        rejected = ~accepted & (status == RUNNING)
        # The rows that were refilled last have made one evaluation.
        first = self.rows.evaluations == 1 if self.refilled else count == 1
        hopeless = rejected & ((rejections >= MAX_REJECTIONS) | first)
        reason = torch.where(trial.finite(), int(Status.STALLED), int(self.solver.failed))
        status = torch.where(hopeless, reason, status)
        if self.solver.searches or trial.energy is not None:
            return status  # a line search finds a short enough step
        diverged = rejected & (rejections > 0) & (trial.norm > self.rows.limit)
        return torch.where(diverged, int(Status.DIVERGED), status)

    def _propose(self) -> Tensor:
        """The next point to evaluate (n, D)."""
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
            self.uneven = True  # from now on a row may pass by a number of evaluations
            extra = rows.extra_evaluations
            extra = torch.where(rows.status == RUNNING, extra + inputs.products, extra)
            rows.extra_evaluations = extra
        if inputs.gain is not None:
            newest = rows.gains[:, :, self.count % STEPS]
            newest[:] = torch.where(newest > 0, newest.maximum(inputs.gain[:, None]), 0.0)
        if accepted is not None and not self.solver.searches:
            shorter = fallback_step(rows, self.current, self.trial)
            candidate = where_rows(accepted, candidate, shorter)
        return candidate

    def keep(self, stay: Tensor) -> bool:
        """Let only the rows ``stay`` (n,) go on."""
        self.problem = self.problem.rows(stay, len(self.rows.status))
        taken = self.trial is self.current
        self.next = self.next[stay] if self.refilled else self.next
        self.last = None
        for name in ("rows", "growth", "trial", "current", "accepted", "state"):
            setattr(self, name, select_rows(getattr(self, name), stay))
        self.current = self.trial if taken else self.current
        return True

    @property
    def status(self) -> Tensor:
        """(n,) statuses of the rows."""
        return self.rows.status

    def wait(self) -> int:
        """Rows that have ended wait at their values anyway."""
        return 0

    def record_of(self, places: Tensor) -> tuple[Solution, Evaluation]:
        """The solution and the latest evaluation of the rows ``places``."""
        return select_rows(self.solution(), places), select_rows(self.trial, places)

    def read(self, record: tuple[Solution, Evaluation]) -> tuple[Solution, Evaluation]:
        """The solution and the latest evaluation of several groups of rows."""
        return record

    def solution(self) -> Solution:
        """The solution of all samples, in the caller's order, or of the rows that are refilled."""
        parts = [*self.finished, self.rows]
        order = torch.argsort(torch.cat([part.index for part in parts])) if self.finished else None
        rows: Rows = join_rows(parts, order)
        return Solution(
            value=rows.best.value,
            status=rows.status,
            residual=rows.best.relative,
            residual_norm=rows.best.norm,
            steps=rows.steps,
            evaluations=rows.evaluations,
            error=rows.best.error,
            energy=rows.best.energy,
            trace=self.trace,
            _stiffness=stiffness(rows.gains) if self.rule.unit_free else None,
        )

    def _note(self, count: int) -> None:
        """Note the trial of the running rows in the trace and tell the callback."""
        rows, trial, accepted, options = self.rows, self.trial, self.accepted, self.options
        if not (options.record or options.callback):
            return
        running = rows.status == RUNNING
        index, column = rows.index[running], count - 1
        residual = trial.relative().detach()[running]
        energy = None if trial.energy is None else trial.energy.detach()[running]

        def written(whole: Tensor | None, values: Tensor, fill: float) -> Tensor:
            whole = values.new_empty(len(self.latest), 0) if whole is None else whole
            whole = pad(whole, (0, max(0, column + 1 - whole.shape[1])), value=fill)
            whole[index, column] = values
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
            residual = scatter_rows(residual, index, len(self.latest), torch.nan)
            if energy is not None:
                energy = scatter_rows(energy, index, len(self.latest), torch.nan)
            value = self.problem.layout.tree(self.latest)
            options.callback(Progress(count, residual, energy, len(index), value))


def _candidate(point: Evaluation, score: Tensor, error: Tensor) -> Best:
    """A point that may be returned, with its ``score`` (n,) and its estimated ``error`` (n, L)."""
    energy = None if point.energy is None else point.energy.detach()
    relative = point.relative().clamp_max(torch.finfo(point.norms.dtype).max)
    return Best(point.z, score, relative, point.norm, relative_error(point, error), energy)


def _start(first: Evaluation, rule: Rule, window: int, spent: Tensor | None) -> Rows:
    """The rows of a whole batch before its first evaluation is judged."""
    norm = first.norm
    infinite = torch.full_like(norm, torch.inf)
    status = torch.full_like(norm, RUNNING, dtype=torch.int64)
    energy = None if first.energy is None else torch.full_like(first.energy, torch.nan)
    none, (batch, parts) = torch.zeros_like(status), first.norms.shape
    return Rows(
        index=torch.arange(batch, device=norm.device),
        best=Best(first.z, infinite, infinite, infinite, infinite, energy),
        status=status,
        steps=none,
        evaluations=none,
        extra_evaluations=none if spent is None else spent,
        rejections=none,
        scale=torch.ones_like(norm),
        limit=DIVERGENCE * torch.maximum(norm, first.reference),
        caps=rule.caps(first),
        gains=norm.new_zeros(batch, parts, STEPS),
        recent_norms=norm.new_zeros(batch, window),
        milestone=infinite,
        energy_milestone=infinite,
        path=torch.zeros_like(norm),
        near=torch.zeros_like(status, dtype=torch.bool),
    )

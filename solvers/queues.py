"""Fixed points of a queue of samples: the slots of samples that have ended take the next ones.

In a batch the samples that converge early wait for the others. Here a fixed number of slots is solved at a
time, and each sample has its own count of evaluations, history, limits and best iterate, so its result is
that of a solve by itself. :func:`solve_queue` solves all samples of its arguments, :class:`Queue` those of
any source.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.core.checks import require_callable, require_count, require_flag
from solvers.core.context import Weight, within
from solvers.core.layout import Layout, map_tensors, tensors_of
from solvers.core.loop import Options, Solver
from solvers.core.modes import eager, require_numbers, without_autocast
from solvers.core.problem import Problem
from solvers.core.rows import RUNNING, Evaluation, join_rows, select_rows
from solvers.core.solution import Solution, Status, apply_policy, check_on_failure
from solvers.core.tolerance import Goal, Tolerance, read_tolerance
from solvers.core.verify import verify as verify_value
from solvers.fixed_points import check_inputs, choose_solver, nothing, set_bound
from solvers.methods.dispatch import Rows, refilled
from solvers.methods.fallback import GIVEN_UP, solve_failed

# Slots are refilled when those that wait have cost about as much as a refill, which is many operations on few
# rows: MOST_IDLE evaluations of the whole batch, or fewer for larger batches, FEW divided by their numbers.
MOST_IDLE, LEAST_IDLE, FEW = 1.0, 0.125, 1 << 13
# Samples that have ended are reported when they are so many times the slots, or after so many turns.
MOST_ENDED, LATEST = 2, 16


@eager
def solve_queue(
    f: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...] | Tensor = (),
    *,
    slots: int = 128,
    solver: Solver | type[Solver] | str | None = None,
    tolerance: Tolerance | float | None = None,
    max_steps: int = 50,
    mask: Any = None,
    on_failure: str = "warn",
    verify: bool = True,
    stop: Callable[..., Tensor] | None = None,
    measure: Callable[[Any], Any] | None = None,
) -> Solution:
    """Solve ``z = f(z, *args)`` for every sample, ``slots`` of them at a time, without gradients.

    When samples end, others take their slots, so a batch is full until the queue is empty. Compared with
    :func:`fixed_point` on batches of that size this pays where the numbers of evaluations differ, because no
    sample waits for the slowest one of its batch. Statuses, residuals and evaluations are those of a solve of
    each sample by itself; values agree to the tolerance.

    Args:
        f, z0, args, solver, tolerance, max_steps, mask, on_failure, verify, measure: see :func:`fixed_point`.
            Tensors of the whole batch must be in ``args``. The solver is ``Anderson()``, ``LBFGS()``,
            ``Forward()`` or ``GradientDescent()``; by default samples that stall or diverge are solved
            again by other solvers, as by :func:`fixed_point`.
        slots: number of samples that are solved at a time, >= 1.
        stop: rule ``stop(z, *args) -> (n,) bool`` about the n samples in the slots, with their arguments.

    Returns:
        The :class:`Solution` of all samples, in the order of the arguments.

    Raises:
        TypeError, ValueError: if an argument is invalid.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.

    Example:
        >>> gain = torch.tensor([[0.1], [0.5], [0.9], [0.2]])
        >>> solution = solve_queue(lambda z, a: a * torch.cos(z), torch.zeros(4, 1), gain, slots=2)
        >>> solution.statuses, solution.value.flatten()
        (['CONVERGED', 'CONVERGED', 'CONVERGED', 'CONVERGED'], tensor([0.0995, 0.4502, 0.6926, 0.1962]))
    """
    args = (args,) if isinstance(args, Tensor) else args
    require_numbers(z0)
    layout = Layout.of(z0)
    check_inputs(z0, args)
    check_on_failure(on_failure)
    queue = Queue(
        f, slots, solver=solver, tolerance=tolerance, max_steps=max_steps, on_failure="ignore",
        verify=verify, stop=stop, measure=measure,
    )  # fmt: skip
    whole, start = Problem.of(f, None, z0, args, mask, True, layout), layout.vector(z0).detach()
    if start.numel() == 0:
        return nothing(whole, start, False)

    def group(tree: Any) -> Group:
        start, args, mask = tree
        return Group(replace(whole, args=args, mask=mask), start)

    item = (start.resolve_neg(), args, whole.mask), len(start)
    index, solutions = zip(*queue.solve([item], group), strict=True)
    solution = join_rows(solutions, torch.argsort(torch.cat(index)))
    apply_policy(solution, on_failure, queue.what + layout.scalars(len(start)), f)
    return solution


@dataclass
class Group:
    """Samples of a queue: the problem of their rows, and their initial states (n, D)."""

    problem: Problem
    start: Tensor


class Queue:
    """Slots for the samples of a source, with the options of :func:`solve_queue`.

    ``record`` makes rows whose turns are recorded, from the problem and the initial states of the first
    samples; its result is None where they cannot be. ``weights`` are parametrised weights that have been
    computed.
    """

    def __init__(
        self, f: Callable[..., Any], slots: int, *, solver: Any, tolerance: Any, max_steps: int,
        on_failure: str, verify: bool, stop: Callable[..., Tensor] | None,
        measure: Callable[[Any], Any] | None,
        record: Callable[[Problem, Tensor, Goal], Rows | None] | None = None,
        weights: dict[int, Weight] | None = None,
    ) -> None:  # fmt: skip
        require_callable("f", f)
        require_callable("stop", stop, optional=True)
        check_on_failure(on_failure)
        self.f, self.slots, self.on_failure = f, require_count("slots", slots), on_failure
        self.verify = require_flag("verify", verify)
        self.measure = require_callable("measure", measure, optional=True)
        self.given = read_tolerance("tolerance", tolerance)
        self.solver, self.automatic = choose_solver(f, None, solver)
        if type(self.solver).renew is Solver.renew:
            raise TypeError(
                f"{type(self.solver).__name__} cannot take new samples in place of others: use Anderson(), "
                "LBFGS(), Forward() or GradientDescent()"
            )
        most, by_row = require_count("max_steps", max_steps), stop is not None
        self.options = Options(Tolerance(), most, stop=stop, by_row=by_row)
        self.record, self.weights = record, weights
        self.goal: Any = None
        self.apart = True  # samples are verified apart from those in the slots

    @property
    def what(self) -> str:
        """What is solved, for messages."""
        return self.goal.what

    def solve(
        self, source: Iterable[tuple[Any, int]], prepare: Callable[[Any], Group]
    ) -> Iterator[tuple[Tensor, Solution]]:
        """Yield the indices (n,) and the solutions of samples that have ended, in groups.

        An error of the source, or of ``prepare``, is raised after the samples before it have ended.

        Args:
            source: batches of samples, pytrees of tensors, with the number of samples of each.
            prepare: makes the problem of some of them, a pytree like those of the source.
        """
        feed = _Feed(iter(source), prepare, self.slots)
        if feed.read(self.slots):
            turns, layout = self._turns(feed), feed.group.problem.layout
            device, answer = feed.group.start.device, None
            while True:
                # The modes are left before a yield, which would leak them to the caller.
                with self._modes(device):
                    try:
                        event = turns.send(answer)
                    except StopIteration:
                        break
                answer = feed.read(event) if isinstance(event, int) else None
                if not isinstance(event, int):
                    index, solution = event
                    solution.value = layout.tree(solution.value)
                    apply_policy(solution, self.on_failure, self.what, self.f)
                    yield index, solution
        if feed.error is not None:
            raise feed.error

    def _turns(self, feed: _Feed) -> Generator[Any, Any, None]:
        """Solve the samples of ``feed``, of which the first are prepared.

        Yields a number where so many samples can enter and none is prepared, to which the answer is whether
        the feed has read some; and the indices and solutions of samples that have ended.
        """
        most = min(MOST_IDLE, max(LEAST_IDLE, FEW / feed.group.start[: self.slots].numel()))
        start, index, *own = [t.clone() for t in feed.take(self.slots)]
        rows = self._begin(feed.group.problem, start, own)
        running, occupied = rows.move(), len(index)
        # Evaluations of rows that have ended, in batches: since rows were chosen to leave, and the next one.
        idle = waiting = 0.0
        # Rows that leave after the next evaluation, which verifies them.
        places: Tensor | None = None
        own = _own(rows.problem)
        ended: list[Any] = []  # samples that are not yet reported
        failed: list[_Ended] = []  # to be solved again
        waited = 0  # turns since the first of them ended
        while occupied:
            idle, leave = idle + waiting, places is not None
            if places is None and (idle >= most or running == 0):
                running += rows.wait()
                places = torch.nonzero((rows.status != RUNNING) & (index >= 0)).flatten()
                idle, leave = 0.0, not self.verify
                places = places if len(places) else None
            if leave and places is not None:
                known = tuple([t.index_select(0, places) for t in (index, *own)])
                ended.append((known, rows.record_of(places)))
                occupied -= len(places)
                while len(places) and (feed.left or (yield len(places))):
                    start, *new = feed.take(len(places))
                    entered, places = places[: len(start)], places[len(start) :]
                    for old, tensor in zip((index, *own), new, strict=True):
                        old.index_copy_(0, entered, tensor)
                    rows.put(entered, start)
                    running, occupied = running + len(start), occupied + len(start)
                if len(places) and occupied:
                    index.index_fill_(0, places, -1)
                    stay = torch.nonzero(index >= 0).flatten()
                    if rows.keep(stay):
                        index, own = index[stay], _own(rows.problem)
                places = None
            waiting = 0.0 if leave else (occupied - running) / len(index)
            waited = waited + 1 if ended else 0
            many = sum(len(known[0]) for known, _ in ended) >= MOST_ENDED * self.slots
            if waited >= LATEST or many or (ended and not occupied):
                (found, *tensors), record = join_rows(ended)
                whole = _Ended(found, self._problem_of(tensors), *rows.read(record))
                yield from self._reported(whole, failed)
                ended, waited = [], 0
            if failed and (sum(map(len, failed)) >= self.slots or not occupied):
                yield self._again(failed)
                failed = []
            if occupied:
                rows.evaluate()
                running = rows.move()

    @contextmanager
    def _modes(self, device: torch.device) -> Iterator[None]:
        """The modes in which a solve runs; never around a ``yield``."""
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            without_autocast(device.type),
            within(**({} if self.weights is None else {"weights": self.weights})),
        ):
            yield

    def _begin(self, problem: Problem, start: Tensor, tensors: list[Tensor]) -> Rows:
        """Begin with the first samples, whose tensors are written over later."""
        self.problem = replace(problem, measure=self.measure, batch=len(start))
        problem = replace(self._problem_of(tensors), batch=0)
        self.goal = Goal(self.given, start.dtype, problem.autocast, start.device)
        with self.goal.watching():
            first = problem.evaluate_first(start)
        precision, tolerance = self.goal.precision, self.goal.tolerance
        self.options = replace(self.options, tolerance=tolerance, precision=precision)
        rows = None if self.record is None else self.record(problem, start, self.goal)
        return rows or refilled(problem, first, self.solver, self.options)

    def _problem_of(self, tensors: Sequence[Tensor]) -> Problem:
        """The problem of samples with these tensors of their own."""
        own = iter(tensors)
        args, given, mask = map_tensors(lambda t: next(own) if t.dim() else t, _given(self.problem))
        return replace(self.problem, args=args, given=given, mask=mask)

    def _reported(self, whole: _Ended, failed: list[_Ended]) -> Iterator[tuple[Tensor, Solution]]:
        """Yield the verified solution of samples that have ended, except for those to be solved again."""
        if self.automatic:
            solution = whole.solution
            again = torch.isfinite(solution.residual)
            again = again & torch.isin(solution.status, solution.status.new_tensor(GIVEN_UP))
            if bool(again.any()):
                failed.append(whole.rows(torch.nonzero(again).flatten()))
                whole = whole.rows(torch.nonzero(~again).flatten())
        if len(whole):
            yield self._checked(whole)

    def _again(self, failed: list[_Ended]) -> tuple[Tensor, Solution]:
        """Solve samples that have failed by other solvers, from their best iterates."""
        parts = [(each.index, tuple(_own(each.problem)), each.solution) for each in failed]
        index, tensors, solution = join_rows(parts)
        problem = self._problem_of(tensors)
        solution = solve_failed(problem, solution, self.options)
        return self._checked(_Ended(index, problem, solution, None))

    def _checked(self, ended: _Ended) -> tuple[Tensor, Solution]:
        """Verify samples that have ended.

        While samples are INCONSISTENT, and so at first, they are evaluated apart from those in the slots: a
        map whose rows influence each other shows it then.
        """
        problem, solution, image = ended.problem, ended.solution, ended.image
        if self.verify:
            if image is None or self.apart:
                image = problem.evaluate(solution.value)
            point = problem.point(solution.value, image) if isinstance(image, Tensor) else image
            verify_value(solution, point, self.goal, problem.unit_free)
            self.apart = bool((solution.status == Status.INCONSISTENT).any())
        set_bound(solution, self.f)
        return ended.index, solution


@dataclass
class _Ended:
    """Samples that have ended: their indices, problem and solution, with a value (n, D)."""

    index: Tensor
    problem: Problem
    solution: Solution
    image: Evaluation | Tensor | None  # the evaluation at the value, or f there, where it is known

    def __len__(self) -> int:
        return len(self.index)

    def rows(self, places: Tensor) -> _Ended:
        """The samples ``places`` among these."""
        solution, image = select_rows(self.solution, places), select_rows(self.image, places)
        return _Ended(self.index[places], self.problem.rows(places, len(self)), solution, image)


class _Feed:
    """Samples of a source, as many at a time as are asked for; ``group`` has those that are prepared."""

    group: Group
    own: list[Tensor]  # its initial states, indices and tensors

    def __init__(
        self, source: Iterator[tuple[Any, int]], prepare: Callable[[Any], Group], most: int
    ) -> None:
        self.source, self.prepare, self.most = source, prepare, most
        self.tree: Any = None  # the batch that is being prepared
        self.first: Any = None  # the first batch of all
        self.size = self.at = 0  # of the batch; samples of it that have been prepared
        self.count = self.left = 0  # samples that were prepared, and those of them not handed out
        self.error: Exception | None = None

    def read(self, number: int) -> bool:
        """Prepare at least ``number`` samples, in pieces of ``most`` of a batch; False if none is left."""
        parts = list[Any]()
        try:
            while number > 0 and self._has_more():
                start, self.at = self.at, min(self.at + self.most, self.size)
                parts.append(_slice(self.tree, start, self.at, self.size))
                number -= self.at - start
        except Exception as error:
            self._end(error)
        if parts:
            try:
                self.group = self.prepare(join_rows(parts))
                start, first = self.group.start, self.count
                self.left = len(start)
                self.count += self.left
                index = torch.arange(first, self.count, device=start.device)
                self.own = [start, index, *_own(self.group.problem)]
            except Exception as error:
                self._end(error)
        return self.left > 0

    def take(self, number: int) -> list[Tensor]:
        """The initial states, indices and tensors of at most ``number`` prepared samples."""
        first = len(self.own[0]) - self.left
        self.left = max(0, self.left - number)
        return [t[first : len(t) - self.left] for t in self.own]

    def _has_more(self) -> bool:
        """Whether a sample is left; reads on in the source."""
        while self.at == self.size:
            item = next(self.source, None)
            if item is None:
                return False
            self.tree, self.size = item
            self.at = 0
            self.first = self.tree if self.first is None else self.first
            _check_alike(self.tree, self.first)
        return True

    def _end(self, error: Exception) -> None:
        """Keep an error, which ends the source, for later."""
        self.error = self.error or error
        self.source, self.at, self.size = iter(()), 0, 0


def _check_alike(tree: Any, first: Any) -> None:
    """Raise ValueError unless the samples of a batch look like those of the first one."""
    (leaves, spec), (others, wanted) = pytree.tree_flatten(tree), pytree.tree_flatten(first)
    if spec != wanted:
        raise ValueError(
            f"all batches must have the structure of the first one, {wanted}, got {spec}"
        )
    for leaf, other in zip(leaves, others, strict=True):
        if not (isinstance(leaf, Tensor) and isinstance(other, Tensor)):
            continue
        if leaf.shape[1:] != other.shape[1:] or leaf.dtype != other.dtype:
            raise ValueError(
                "all samples must have the shape and the dtype of the first ones, "
                f"{tuple(other.shape[1:])} and {other.dtype}, got {tuple(leaf.shape[1:])} and "
                f"{leaf.dtype}: pad them to the size of the largest and pass a mask"
            )


def _slice(tree: Any, start: int, end: int, batch: int) -> Any:
    """The samples ``start`` to ``end`` of a pytree with ``batch`` samples."""
    if end - start == batch:
        return tree
    return map_tensors(lambda t: t[start:end] if t.dim() and len(t) == batch else t, tree)


def _own(problem: Problem) -> list[Tensor]:
    """The tensors that have a row for each sample."""
    return [t for t in tensors_of(_given(problem)) if t.dim()]


def _given(problem: Problem) -> tuple[Any, ...]:
    """What each sample of a problem has of its own."""
    return problem.args, problem.given, problem.mask

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
from solvers.core.layout import Layout, leaves_of, map_tensors
from solvers.core.loop import Options, Solver
from solvers.core.modes import eager, require_numbers, without_autocast
from solvers.core.problem import Problem
from solvers.core.rows import RUNNING, select_rows
from solvers.core.solution import (
    Goal,
    Solution,
    Tolerance,
    apply_policy,
    check_on_failure,
    read_tolerance,
)
from solvers.core.verify import verify as verify_value
from solvers.fixed_points import check_inputs, choose_solver, nothing, set_bound
from solvers.methods.dispatch import Rows, refilled
from solvers.methods.fallback import GIVEN_UP, solve_failed

# Slots are refilled when those that wait have cost as much as a refill: MOST_IDLE evaluations of the whole
# batch, or fewer for batches with more than FEW numbers, whose evaluations cost more.
MOST_IDLE, LEAST_IDLE, FEW = 1.5, 0.125, 1 << 14
# Samples that have ended are verified and reported when they would fill the slots, or after so many turns.
LATEST = 16


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
    solution = _join(solutions, torch.argsort(torch.cat(index)))
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
        self,
        f: Callable[..., Any],
        slots: int,
        *,
        solver: Any,
        tolerance: Any,
        max_steps: int,
        on_failure: str,
        verify: bool,
        stop: Callable[..., Tensor] | None,
        measure: Callable[[Any], Any] | None,
        record: Callable[[Problem, Tensor, Goal], Rows | None] | None = None,
        weights: dict[int, Weight] | None = None,
    ) -> None:
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
        self.options = Options(
            Tolerance(), require_count("max_steps", max_steps), stop=stop, by_row=stop is not None
        )
        self.record = record
        self.weights = weights
        self.goal: Any = None

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
        feed = _Feed(iter(source), prepare)
        answer = feed.take(self.slots)
        if answer is not None:
            turns, layout = self._turns(*answer), answer[1].problem.layout
            device, answer = answer[0].device, None
            while True:
                # The modes are left before a yield, which would leak them to the caller.
                with self._modes(device):
                    try:
                        event = turns.send(answer)
                    except StopIteration:
                        break
                answer = feed.take(event) if isinstance(event, int) else None
                if not isinstance(event, int):
                    index, solution = event
                    solution.value = layout.tree(solution.value)
                    apply_policy(solution, self.on_failure, self.what, self.f)
                    yield index, solution
        if feed.error is not None:
            raise feed.error

    def _turns(self, index: Tensor, group: Group) -> Generator[Any, Any, None]:
        """Solve the samples of a ``group`` with these indices, and those that are sent after it.

        Yields a number where so many new samples can enter, to which the answer is what :meth:`_Feed.take`
        returns, and the indices and solutions of samples that have ended.
        """
        rows = self._begin(group)
        index = index.clone()  # it may have been made in inference mode
        running, occupied, idle = rows.move(), len(index), 0.0
        most = min(MOST_IDLE, max(LEAST_IDLE, FEW / group.start.numel()))
        ended: list[_Ended] = []  # not yet reported
        failed: list[_Ended] = []  # to be solved again
        waited = 0  # turns since the first of them ended
        while occupied:
            idle += (occupied - running) / len(index)
            if idle >= most or running == 0:
                places = torch.nonzero((rows.status != RUNNING) & (index >= 0)).flatten()
                problem = rows.problem.rows(places, len(index))
                ended.append(_Ended(index[places], problem, rows.solution_of(places)))
                entered, number, idle = (yield len(places)), 0, 0.0
                if entered is not None:
                    new, group = entered
                    number = len(new)
                    _write(rows.problem, places[:number], group.problem)
                    rows.put(places[:number], group.start)
                    index[places[:number]] = new
                running, occupied = running + number, occupied + number - len(places)
                if number < len(places) and occupied:
                    index[places[number:]] = -1
                    stay = torch.nonzero(index >= 0).flatten()
                    index = index[stay] if rows.keep(stay) else index
            waited = waited + 1 if ended else 0
            if waited >= LATEST or _number(ended) >= self.slots or (ended and not occupied):
                yield from self._reported(ended, failed)
                ended, waited = [], 0
            if failed and (_number(failed) >= self.slots or not occupied):
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

    def _begin(self, group: Group) -> Rows:
        """Begin with the first samples, whose tensors are written over later."""
        problem, start = group.problem, group.start.clone()
        args, given, mask = map_tensors(Tensor.clone, _given(problem))
        problem = replace(problem, args=args, given=given, mask=mask, measure=self.measure)
        self.goal = Goal(self.given, start.dtype, problem.autocast, start.device)
        with self.goal.watching():
            first = problem.evaluate_first(start)
        precision, tolerance = self.goal.precision, self.goal.tolerance
        self.options = replace(self.options, tolerance=tolerance, precision=precision)
        rows = None if self.record is None else self.record(problem, start, self.goal)
        return rows or refilled(problem, first, self.solver, self.options)

    def _reported(
        self, ended: list[_Ended], failed: list[_Ended]
    ) -> Iterator[tuple[Tensor, Solution]]:
        """Yield the verified solution of samples that have ended, except for those to be solved again."""
        whole = _Ended.join(ended)
        if self.automatic:
            solution = whole.solution
            again = torch.isfinite(solution.residual)
            again = again & torch.isin(solution.status, solution.status.new_tensor(GIVEN_UP))
            if bool(again.any()):
                failed.append(whole.rows(torch.nonzero(again).flatten()))
                whole = whole.rows(torch.nonzero(~again).flatten())
        if len(whole.index):
            yield self._checked(whole)

    def _again(self, failed: list[_Ended]) -> tuple[Tensor, Solution]:
        """Solve samples that have failed by other solvers, from their best iterates."""
        whole = _Ended.join(failed)
        solution = solve_failed(whole.problem, whole.solution, self.options)
        return self._checked(replace(whole, solution=solution))

    def _checked(self, ended: _Ended) -> tuple[Tensor, Solution]:
        """Verify samples that have ended."""
        problem, solution = ended.problem, ended.solution
        if self.verify:
            allowed, precision = self.goal.allowed(problem.unit_free), self.goal.precision
            verify_value(solution, problem.evaluate(solution.value), allowed, precision)
        set_bound(solution, self.f)
        return ended.index, solution


def _number(parts: list[_Ended]) -> int:
    return sum(len(part.index) for part in parts)


@dataclass
class _Ended:
    """Samples that have ended: their indices, problem and solution, with a value (n, D)."""

    index: Tensor
    problem: Problem
    solution: Solution

    def rows(self, places: Tensor) -> _Ended:
        """The samples ``places`` among these."""
        problem = self.problem.rows(places, len(self.index))
        return _Ended(self.index[places], problem, select_rows(self.solution, places))

    @classmethod
    def join(cls, parts: list[_Ended]) -> _Ended:
        """The samples of all parts."""
        args, given, mask = _join_trees([_given(part.problem) for part in parts])
        problem = replace(parts[0].problem, args=args, given=given, mask=mask)
        index = torch.cat([part.index for part in parts])
        return cls(index, problem, _join([part.solution for part in parts]))


class _Feed:
    """Samples of a source, as many at a time as are asked for."""

    def __init__(self, source: Iterator[tuple[Any, int]], prepare: Callable[[Any], Group]) -> None:
        self.source, self.prepare = source, prepare
        self.tree: Any = None  # the batch that is being handed out
        self.first: Any = None  # the first batch of all
        self.size = self.at = self.count = 0  # of the batch; samples handed out of it, and of all
        self.error: Exception | None = None

    def take(self, number: int) -> tuple[Tensor, Group] | None:
        """The indices and the problem of the next samples, at most ``number``; None if there are none."""
        parts, before = list[Any](), self.count
        try:
            while number > 0 and self._has_more():
                start, self.at = self.at, min(self.at + number, self.size)
                parts.append(_slice(self.tree, start, self.at, self.size))
                self.count, number = self.count + self.at - start, number - self.at + start
        except Exception as error:
            self._end(error)
        if not parts:
            return None
        try:
            group = self.prepare(_join_trees(parts))
        except Exception as error:
            self._end(error)
            return None
        return torch.arange(before, self.count, device=group.start.device), group

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


def _write(problem: Problem, places: Tensor, new: Problem) -> None:
    """Write the arguments and the mask of new samples into the rows ``places`` of a problem."""
    for old, value in zip(leaves_of(_given(problem)), leaves_of(_given(new)), strict=True):
        if isinstance(old, Tensor) and old.dim():
            old.index_copy_(0, places, value)


def _given(problem: Problem) -> tuple[Any, ...]:
    """What each sample of a problem has of its own."""
    return problem.args, problem.given, problem.mask


def _join_trees(trees: Sequence[Any]) -> Any:
    """One pytree with the samples of several."""
    if len(trees) == 1:
        return trees[0]

    return map_tensors(lambda t, *same: torch.cat((t, *same)) if t.dim() else t, *trees)


def _join(solutions: Sequence[Solution], order: Tensor | None = None) -> Solution:
    """One solution with the samples of several, in this order."""
    first, changes = solutions[0], dict[str, Any]()
    for name in ("value", "status", "residual", "residual_norm", "steps", "evaluations",
                 "energy", "error", "bound"):  # fmt: skip
        parts = [getattr(each, name) for each in solutions]
        whole = None if parts[0] is None else _join_trees(parts)
        changes[name] = (
            whole if order is None else map_tensors(lambda t: t.index_select(0, order), whole)
        )
    return replace(first, **changes)

"""A solve without programs: the loop, C++ for small batches, and second attempts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solvers.core.loop import Loop
from solvers.core.problem import Problem
from solvers.core.rows import Point, Progress
from solvers.core.solution import Solution
from solvers.core.solver import Solver
from solvers.core.tolerance import Goal, Tolerance
from solvers.methods.rescue import rescue
from solvers.methods.turns import solve_left, solve_small


@dataclass(frozen=True)
class Solving:
    """How :func:`solvers.fixed_point` solves a problem, with its options.

    ``automatic``: nobody has named the solver, so that samples which it gives up are tried again.
    """

    solver: Solver
    automatic: bool
    goal: Goal
    max_steps: int
    record: bool
    callback: Callable[[Progress], object] | None
    states_at: Sequence[int]

    @property
    def observed(self) -> bool:
        """Whether somebody looks at single evaluations, or autograd records them."""
        watched = self.record or self.callback is not None or self.states_at
        return bool(watched) or torch.is_grad_enabled()

    def __call__(self, problem: Problem, start: Tensor) -> Solution:
        """The solution from ``start`` (B, D)."""
        first = self._first(problem, start)
        if not self.observed:
            own = (self.solver, self._tolerance(problem), self.max_steps)
            solution = solve_small(problem, first, *own)
            if solution is not None:
                solve_left(problem, start, solution, self._anew)
                problem.check_last(solution.value)
                return solution
        loop = self._loop(problem, first)
        del first  # the loop frees it when it has moved on
        return self._finished(problem, loop)

    def _anew(self, problem: Problem, start: Tensor) -> Solution:
        return self._finished(problem, self._loop(problem, self._first(problem, start)))

    def _first(self, problem: Problem, start: Tensor) -> Point:
        with self.goal.watching():
            return problem.evaluate_first(start)

    def _tolerance(self, problem: Problem) -> Tolerance:
        """That of the samples that are solved here."""
        return (problem.goal or self.goal).tolerance

    def _loop(self, problem: Problem, first: Point) -> Loop:
        return Loop(problem, first, self.solver, self._tolerance(problem), *self._limits)

    @property
    def _limits(self) -> tuple[Any, ...]:
        return self.max_steps, self.record, self.callback, self.states_at

    def _finished(self, problem: Problem, loop: Loop) -> Solution:
        solution = loop.run()
        if self.automatic:
            rescue(problem, solution, self._tolerance(problem), *self._limits)
        problem.check_last(solution.value)
        return solution

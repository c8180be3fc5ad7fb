"""How a fixed point is solved: by the native engine or by the loop, then second attempts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from solvers.core.loop import Loop
from solvers.core.problem import Problem
from solvers.core.rows import Point, Progress
from solvers.core.solution import Solution
from solvers.core.solver import Solver
from solvers.core.tolerance import Goal, Tolerance
from solvers.methods.anderson import Anderson
from solvers.methods.forward import Forward
from solvers.methods.rescue import rescue
from solvers.native.records import serves
from solvers.native.turns import MOST, solve_in_turns


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

    def __call__(self, problem: Problem, start: Tensor) -> Solution:
        """The solution from ``start`` (B, D)."""
        with self.goal.watching():
            first = problem.evaluate_first(start)
        tolerance = self.goal.tolerance
        solution = self._in_engine(problem, first, tolerance)
        options = (self.max_steps, self.record, self.callback, self.states_at)
        if solution is None:
            loop = Loop(problem, first, self.solver, tolerance, *options)
            del first  # the loop frees it when it has moved on
            solution = loop.run()
        if self.automatic:
            rescue(problem, solution, tolerance, *options)
        problem.check_last(solution.value)
        return solution

    def _in_engine(self, problem: Problem, first: Point, tolerance: Tolerance) -> Solution | None:
        """Anderson's method and plain steps in float32 and float64 on a CPU; None: by the loop.

        So it is with an energy, and where somebody looks at single evaluations or autograd records them.
        """
        watched = self.record or self.callback is not None or bool(self.states_at)
        if watched or problem.has_energy or not serves(first.z):
            return None
        solver, start = self.solver, first.z
        if type(solver) is Anderson and solver.memory <= MOST:
            memory, numbers = solver.memory, (solver.damping, *solver.ridge(start.dtype))
        elif type(solver) is Forward:
            memory, numbers = 0, (solver.damping, 1.0, 0.0)
        else:
            return None
        return solve_in_turns(problem, first, memory, numbers, tolerance, self.max_steps)

"""Run one solver, in C++ if it is supported there and otherwise in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from solvers.core.loop import Loop, Rule, Solver
from solvers.core.problem import Problem
from solvers.core.rows import Point, Progress
from solvers.core.solution import Solution, Tolerance
from solvers.methods.anderson import Anderson
from solvers.methods.steps import Forward
from solvers.native import MOST, serves, solve_in_turns


def iterate(
    problem: Problem,
    first: Point,
    solver: Solver,
    tolerance: Tolerance,
    max_steps: int,
    record: bool = False,
    callback: Callable[[Progress], object] | None = None,
    states_at: Sequence[int] = (),
    rule: Rule | None = None,
) -> tuple[Solution, Point | None]:
    """Solve from the evaluation ``first`` at the start.

    The C++ engine supports Anderson acceleration and plain steps in float32 and float64 on a CPU, for maps
    without an energy, bounds, a trace or a callback, and without autograd.

    Returns:
        The solution, with a value (B, D), and the last evaluation if it included all samples at their
        returned values, else None.
    """
    watched = record or callback is not None or bool(states_at) or rule is not None
    plain = not (watched or problem.has_energy or problem.bounds)
    if plain and serves(first.z):
        if type(solver) is Anderson and solver.memory <= MOST:
            numbers = (solver.damping, *solver.ridge(first.z.dtype))
            return solve_in_turns(problem, first, solver.memory, numbers, tolerance, max_steps)
        if type(solver) is Forward:
            numbers = (solver.damping, 1.0, 0.0)
            return solve_in_turns(problem, first, 0, numbers, tolerance, max_steps)
    loop = Loop(problem, first, solver, tolerance, max_steps, record, callback, states_at, rule)
    del first  # the loop frees it when it has moved on
    return loop.run(), None

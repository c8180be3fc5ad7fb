"""Run one solver: in C++ on CPUs, in turns on CUDA devices, and otherwise by the loop in torch."""

from __future__ import annotations

from collections.abc import Callable

from solvers.core.loop import Loop, Options, Solver
from solvers.core.problem import Problem
from solvers.core.rows import Evaluation
from solvers.core.solution import Solution
from solvers.methods import turns
from solvers.methods.anderson import Anderson
from solvers.methods.steps import Forward
from solvers.native import MOST, serves, solve_in_turns


def iterate(
    problem: Problem,
    first: Evaluation,
    solver: Solver,
    options: Options,
    *,
    automatic: bool = False,
) -> tuple[Solution, Callable[[], Evaluation] | None]:
    """Solve from the evaluation ``first`` at the start.

    The C++ engine supports Anderson acceleration and plain steps in float32 and float64 on a CPU. The turns
    support Anderson acceleration in float32 and half precision on CUDA devices. Both need maps without
    bounds, a trace or a callback, and no autograd. If the solver of an energy was chosen automatically,
    the turns are tried first: they accelerate its gradient step.

    Returns:
        The solution, with a value (B, D), and a function that gives the last evaluation if it included all
        samples at their returned values, else None.
    """
    watched = options.watched or problem.bounds is not None
    plain = not (watched or problem.has_energy)
    limits = options.tolerance, options.max_steps
    anderson = type(solver) is Anderson and plain
    descends = automatic and solver.needs_energy and not watched
    if (anderson or descends) and turns.serves_cuda(first.z):
        chosen = solver if isinstance(solver, Anderson) else Anderson()
        solution, last = turns.solve_on_cuda(problem, first, chosen, *limits)
        if solution is not None:
            return solution, last
    if plain and serves(first.z):
        if type(solver) is Anderson and solver.memory <= MOST:
            numbers = (solver.damping, *solver.ridge(first.z.dtype))
            return solve_in_turns(problem, first, solver.memory, numbers, *limits)
        if type(solver) is Forward:
            return solve_in_turns(problem, first, 0, (solver.damping, 1.0, 0.0), *limits)
    loop = Loop(problem, first, solver, options)
    del first  # the loop frees it when it has moved on
    return loop.run(), None

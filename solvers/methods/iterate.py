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
    a trace, a callback or a measure, and no autograd. If the solver of an energy was chosen automatically,
    the turns are tried first: they accelerate its gradient step.

    Returns:
        The solution, with a value (B, D), and a function that gives the last evaluation if it included all
        samples at their returned values, else None.
    """
    # The engines know neither energies nor measures, and round the residual to the size of z.
    general = options.watched or problem.measure is not None or len(first.sizes) > MOST
    plain = not (general or problem.has_energy or problem.unit_free)
    anderson = type(solver) is Anderson and plain
    descends = automatic and solver.needs_energy and not general
    if (anderson or descends) and turns.serves_cuda(first.z):
        chosen = solver if isinstance(solver, Anderson) else Anderson()
        solution, last = turns.solve_on_cuda(problem, first, chosen, options)
        if solution is not None:
            return solution, last
    if plain and serves(first.z):
        if type(solver) is Anderson and solver.memory <= MOST:
            numbers = (solver.damping, *solver.ridge(first.z.dtype))
            return solve_in_turns(problem, first, solver.memory, numbers, options)
        if type(solver) is Forward:
            return solve_in_turns(problem, first, 0, (solver.damping, 0.0, 0.0), options)
    loop = Loop(problem, first, solver, options)
    del first  # the loop frees it when it has moved on
    return loop.run(), None

"""The compiled solve of a fixed point: blocks of evaluations, one look at the residuals a block.

Samples go together to the end; one that has ended keeps its best iterate and its counts by masks. What is
out of the ordinary (a sample without a finite value, far away, or stalled) is solved from the start by
the ordinary loop, with the outcome that it always has.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from solvers.compiled.inputs import Given, Padding
from solvers.compiled.lanes import Lanes, Numbers, begin, turn
from solvers.compiled.packing import Packed, pack
from solvers.compiled.turns import solve_in_turns, steps_of_program
from solvers.core.modes import without_autocast
from solvers.core.problem import Problem
from solvers.core.rows import RUNNING
from solvers.core.solution import Solution
from solvers.core.solver import Solver
from solvers.core.tolerance import Tolerance
from solvers.methods.turns import Ordinary, solve_left, takes_turns


def compiled_solve(
    problem: Problem,
    start: Tensor,
    solver: Solver,
    tolerance: Tolerance,
    max_steps: int,
    ordinary: Ordinary,
) -> Solution:
    """Solve ``problem``, whose ``programs`` are given, from ``start`` (B, D).

    ``ordinary`` is the solve as it is without programs.
    """
    padding = Padding.of(problem, start)
    problem.programs.begin(start.device)
    with without_autocast(start.device.type):
        solution = _compiled_solution(problem, start, solver, tolerance, max_steps, padding)
    solve_left(problem, start, solution, ordinary)
    return solution


def _compiled_solution(
    problem: Problem,
    start: Tensor,
    solver: Solver,
    tolerance: Tolerance,
    max_steps: int,
    padding: Padding,
) -> Solution:
    """The solution, LEFT where it is out of the ordinary."""
    if takes_turns(solver) and not problem.has_energy:
        steps = steps_of_program(problem.programs, start)
        if steps is not None:
            return solve_in_turns(problem, start, solver, tolerance, max_steps, padding, steps)
    numbers = Numbers.of(tolerance.rows(padding.index), max_steps, start)
    lanes = _run(problem, padding.rows(start), solver, Given.of(problem, padding, numbers))
    return _solution(lanes, start.shape[0])


def _run(problem: Problem, start: Tensor, solver: Solver, given: Packed) -> Lanes:
    """The lanes when no sample runs any more."""
    programs = problem.programs
    block = programs.block
    weights = programs.weights()

    def first(z: Tensor, inside: Given) -> Lanes:
        own = inside.problem(problem)
        lanes, point = begin(z, own)
        lanes = turn(lanes, point, own, solver, inside.numbers)
        return _more(lanes, own, solver, inside.numbers, block)

    def further(lanes: Lanes, inside: Given) -> Lanes:
        own = inside.problem(problem)
        return _more(lanes, own, solver, inside.numbers, block)

    key = (problem.static_key(), solver, block)
    lanes = programs.call(first, ("first", key), [pack(start), given], weights)
    while bool(lanes.get("status").eq(RUNNING).any()):
        lanes = programs.call(further, ("further", key), [lanes, given], weights)
    return lanes.record()


def _more(lanes: Lanes, own: Problem, solver: Solver, numbers: Numbers, turns: int) -> Lanes:
    for _ in range(turns):
        lanes = turn(lanes, own.evaluate(lanes.trial), own, solver, numbers)
    return replace(lanes, state=solver.settled(lanes.state))


def _solution(lanes: Lanes, batch: int) -> Solution:
    own = lanes.status.device.type == "cuda"  # else a later program may write there

    def rows(tensor: Tensor) -> Tensor:
        return tensor[:batch].clone() if own else tensor[:batch]

    best = lanes.best
    return Solution(
        value=rows(best.value),
        status=rows(lanes.status),
        residual=rows(best.relative),
        residual_norm=rows(best.norm),
        steps=rows(lanes.evaluations - lanes.rejected),
        evaluations=rows(lanes.evaluations),
        energy=None if best.energy is None else rows(best.energy),
    )

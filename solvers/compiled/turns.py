"""A compiled solve on the CPU, one evaluation after another: a program evaluates, C++ does the rest.

A call of each costs little there, so that blocks of evaluations (:mod:`solvers.compiled.forward`) would
only make evaluations that nobody needs. What is out of the ordinary is left to the ordinary loop, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from solvers.compiled.inputs import Given, Padding
from solvers.compiled.packing import pack
from solvers.core.guards.native import native_steps, wanting_native_steps
from solvers.core.problem import Problem
from solvers.core.solution import Solution
from solvers.core.solver import Solver
from solvers.core.tolerance import Tolerance
from solvers.methods.turns import Turns
from solvers.native import process
from solvers.native.steps import Steps


def one_by_one(programs: Any, device: torch.device) -> bool:
    """Whether evaluations on this device are compiled one by one, not in blocks."""
    return device.type == "cpu" and (programs.backend == "inductor" or process.ENABLED)


def steps_of_program(programs: Any, like: Tensor) -> Steps | None:
    """Steps in C++ for a solve by ``programs``: whoever has Inductor compile on a CPU has a compiler."""
    if not one_by_one(programs, like.device):
        return None
    with wanting_native_steps():
        return native_steps(like)


def solve_in_turns(
    problem: Problem,
    start: Tensor,
    solver: Solver,
    tolerance: Tolerance,
    max_steps: int,
    padding: Padding,
    steps: Steps,
) -> Solution:
    """The solution from ``start`` (B, D), whose status may be LEFT."""
    programs = problem.programs
    given = Given.of(problem, padding, None)
    problem.given = padding, given  # for the adjoint
    rows = padding.rows(start)

    def evaluate(z: Tensor, inside: Given) -> Tensor:
        own = inside.problem(problem)
        return own.image(z)

    key = ("evaluation", problem.static_key())
    parts = [pack(rows), given]
    (evaluation,), _ = programs.stages(evaluate, key, parts, programs.weights())
    mask = None if problem.mask is None else padding.rows(problem.mask)
    turns = Turns(rows, solver, tolerance.rows(padding.index), max_steps, mask, steps)
    while turns.take(evaluation(turns.trial)[0]):
        pass
    return turns.solution(start.shape[0])

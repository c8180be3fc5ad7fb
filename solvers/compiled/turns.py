"""A compiled solve on the CPU, one evaluation after another: a program evaluates, C++ does the rest.

A call of each costs little there, so that blocks of evaluations (:mod:`solvers.compiled.forward`) would
only make evaluations that nobody needs. What is out of the ordinary is left to the ordinary loop, too.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from solvers.compiled.inputs import Given, Padding
from solvers.compiled.packing import pack
from solvers.core.guards.native import native_steps, wanting_native_steps
from solvers.core.loop import DIVERGENCE, PATIENCE
from solvers.core.problem import Problem
from solvers.core.rows import MODERATE_ABOVE, RUNNING
from solvers.core.solution import Solution
from solvers.core.solver import Solver
from solvers.core.tolerance import Tolerance
from solvers.methods.anderson import Anderson
from solvers.methods.forward import Forward
from solvers.native import process
from solvers.native.process import THREADS
from solvers.native.steps import MOST, Ring, Steps, Turn


def one_by_one(programs: Any, device: torch.device) -> bool:
    """Whether evaluations on this device are compiled one by one, not in blocks."""
    return device.type == "cpu" and (programs.backend == "inductor" or process.ENABLED)


def steps_of_program(programs: Any, like: Tensor) -> Steps | None:
    """Steps in C++ for a solve by ``programs``: whoever has Inductor compile on a CPU has a compiler."""
    if not one_by_one(programs, like.device):
        return None
    with wanting_native_steps():
        return native_steps(like)


def takes_turns(solver: Solver) -> bool:
    """Whether the solver's steps exist in C++."""
    return type(solver) is Forward or (type(solver) is Anderson and solver.memory <= MOST)


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


class Turns:
    """The state of a solve; tensors have one row a sample, none ever leaves.

    Attributes:
        trial: (B, D) where the map is to be evaluated next; it is overwritten by every :meth:`take`.
    """

    def __init__(
        self,
        start: Tensor,
        solver: Solver,
        tolerance: Tolerance,
        max_steps: int,
        mask: Tensor | None,
        steps: Steps,
    ) -> None:
        batch, size = start.shape
        self.steps, self.mask = steps, mask
        self.trial, self.best = start.clone(), start.clone()
        counts = torch.tensor([[RUNNING], [0]], device=start.device)  # whatever the default is
        self.status, self.evaluations = counts.expand(2, batch).clone()
        self.relative, self.norm = start.new_full((2, batch), torch.inf)
        self._tolerance = [
            torch.as_tensor(part, dtype=start.dtype, device=start.device).contiguous()
            for part in (tolerance.rtol, tolerance.atol)
        ]
        numbers, sizes = self._ring(solver, start)
        # One piece of memory for what nobody else sees.
        residual, limit = [batch * size], [batch, batch]
        self._own, places = _pieces(start, [*sizes, *residual, *limit])
        *ring, residual_at, limit_at, milestone_at = places
        best = (self.best, self.relative, self.norm)
        self._turn = Turn(
            Ring(*ring, *[None] * (5 - len(ring)), *numbers),
            self.trial.data_ptr(), None, None if mask is None else mask.data_ptr(), residual_at,
            *[tensor.data_ptr() for tensor in best], limit_at, milestone_at,
            *[tensor.data_ptr() for tensor in (*self._tolerance, self.status, self.evaluations)],
            THREADS.fork, THREADS.number, batch, size, 0, max_steps, PATIENCE,
            *[tensor.dim() for tensor in self._tolerance], MODERATE_ABOVE[start.dtype], DIVERGENCE,
        )  # fmt: skip

    def _ring(self, solver: Any, start: Tensor) -> tuple[tuple[Any, ...], list[int]]:
        """The numbers of a :class:`Ring`, and the sizes of its arrays."""
        batch, size = start.shape
        if not isinstance(solver, Anderson):
            return (0, 0, False, solver.damping, 1.0, 0.0), []
        kept = min(solver.memory, size)
        numbers = (kept, 0, True, solver.damping, *solver.ridge(start.dtype))
        history, state = batch * kept * size, batch * size
        return numbers, [history, history, batch * kept * kept, state, state]

    def take(self, value: Tensor) -> int:
        """Judge the map's ``value`` (B, D) at ``trial`` and make the next one; how many samples go on."""
        turn, value = self._turn, value.contiguous().resolve_neg()
        if value.shape != self.trial.shape or value.dtype != self.trial.dtype:  # C++ would not ask
            wanted, got = (f"{tuple(t.shape)} {t.dtype}" for t in (self.trial, value))
            raise ValueError(f"f(z) must be like z, {wanted}, got {got}")
        turn.value = value.data_ptr()
        turn.count += 1
        turn.ring.count = max(turn.count - 2, 0)
        return self.steps.turn(ctypes.byref(turn))

    def solution(self, batch: int) -> Solution:
        """What has been found, of the first samples."""
        evaluations = self.evaluations[:batch]
        return Solution(
            value=self.best[:batch],
            status=self.status[:batch],
            residual=self.relative[:batch],
            residual_norm=self.norm[:batch],
            steps=evaluations,
            evaluations=evaluations.clone(),
            energy=None,
        )


def _pieces(like: Tensor, sizes: list[int]) -> tuple[Tensor, list[int]]:
    """Memory for so many numbers each, not set to anything, and where each piece begins."""
    ends = list(accumulate(-(-size // 16) * 16 for size in sizes))  # on cache lines
    memory = like.new_empty(ends[-1])
    first, width = memory.data_ptr(), memory.element_size()
    return memory, [first + width * start for start in [0, *ends[:-1]]]

"""A compiled solve on the CPU, one evaluation after another: a program evaluates, C++ does the rest.

A call of each costs little there, so that blocks of evaluations (:mod:`solvers.compiled.forward`) would
only make evaluations that nobody needs. What is out of the ordinary is left to the ordinary loop, too.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from solvers.compiled.inputs import Given, Padding
from solvers.compiled.packing import pack
from solvers.core.guards.native import native_steps, wanting_native_steps
from solvers.core.loop import DIVERGENCE, PATIENCE
from solvers.core.problem import Problem
from solvers.core.rows import MODERATE_ABOVE
from solvers.core.solution import Solution
from solvers.core.solver import Solver
from solvers.core.tolerance import Tolerance
from solvers.methods.anderson import Anderson
from solvers.methods.forward import Forward
from solvers.native import process, spare
from solvers.native.process import THREADS
from solvers.native.steps import MOST, Ring, Steps, Turn, number


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
        ring = _numbers(solver, start)
        # Within inference mode tensors are made that nobody may change outside of it.
        self._kind = "turns", start.shape, start.dtype, ring[0], torch.is_inference_mode_enabled()
        self._own = own = spare.take(self._kind, lambda: _Memory(start, ring[0]))
        self.steps, self.mask, self.trial = steps, mask, own.trial.copy_(start)
        self.best = torch.empty_like(start)
        # C++ writes to all of them at the first evaluation.
        batch = (len(start),)
        self.relative, self.norm = start.new_empty(batch), start.new_empty(batch)
        self.status = start.new_empty(batch, dtype=torch.int64)
        self.evaluations = torch.empty_like(self.status)
        self._tolerances = [number(part, start) for part in (tolerance.rtol, tolerance.atol)]
        self._turn = turn = own.turn
        self._ring = turn.ring
        (
            self._ring.kept, self._ring.count, self._ring.keeps,
            self._ring.damping, self._ring.ridge, self._ring.tiny,
        ) = ring  # fmt: skip
        turn.mask = None if mask is None else mask.data_ptr()
        turn.best, turn.best_relative = self.best.data_ptr(), self.relative.data_ptr()
        turn.best_norm = self.norm.data_ptr()
        turn.status, turn.evaluations = self.status.data_ptr(), self.evaluations.data_ptr()
        turn.rtol, turn.atol = (part.data_ptr() for part in self._tolerances)
        turn.each_rtol, turn.each_atol = (part.dim() for part in self._tolerances)
        turn.fork, turn.threads = THREADS.fork, THREADS.number
        turn.count, turn.max_steps = 0, max_steps

    def take(self, value: Tensor) -> int:
        """Judge the map's ``value`` (B, D) at ``trial`` and make the next one; how many samples go on."""
        turn, trial, value = self._turn, self.trial, value.contiguous().resolve_neg()
        if value.shape != trial.shape or value.dtype != trial.dtype:  # C++ would not ask
            wanted, got = (f"{tuple(t.shape)} {t.dtype}" for t in (trial, value))
            raise ValueError(f"f(z) must be like z, {wanted}, got {got}")
        turn.value = value.data_ptr()
        turn.count = count = turn.count + 1
        self._ring.count = max(count - 2, 0)
        return self.steps.turn(self._own.at)

    def solution(self, batch: int) -> Solution:
        """What has been found, of the first samples; the memory is left to the next solve."""
        spare.give_back(self._kind, self._own, self._own.numbers)
        found = (self.best, self.status, self.relative, self.norm, self.evaluations)
        if batch < len(self.best):
            found = tuple(tensor[:batch] for tensor in found)
        value, status, relative, norm, evaluations = found
        return Solution(
            value=value,
            status=status,
            residual=relative,
            residual_norm=norm,
            steps=evaluations,
            evaluations=evaluations.clone(),
            energy=None,
        )


def _numbers(solver: Any, start: Tensor) -> tuple[Any, ...]:
    """The numbers of a :class:`Ring`."""
    if not isinstance(solver, Anderson):
        return 0, 0, False, solver.damping, 1.0, 0.0
    return min(solver.memory, start.shape[1]), 0, True, solver.damping, *solver.ridge(start.dtype)


class _Memory:
    """What nobody sees of a solve, for ``kept`` differences, and the record with its places."""

    def __init__(self, start: Tensor, kept: int) -> None:
        batch, size = start.shape
        self.trial = torch.empty_like(start)
        history, state = batch * kept * size, batch * size
        ring = [history, history, batch * kept * kept, state, state] if kept else []
        sizes = [*ring, state, batch, batch]
        self.memory, places = spare.pieces(start, sizes)
        *ring, residual, limit, milestone = places
        self.turn = turn = Turn(Ring(*(ring or [None] * 5)), self.trial.data_ptr())
        turn.residual, turn.limit, turn.milestone = residual, limit, milestone
        turn.batch, turn.size, turn.patience = batch, size, PATIENCE
        turn.moderate, turn.divergence = MODERATE_ABOVE[start.dtype], DIVERGENCE
        self.at, self.numbers = ctypes.addressof(turn), sum(sizes)

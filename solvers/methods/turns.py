"""Solves in turns: the map is evaluated, and one call of C++ judges every sample and makes all steps.

What is out of the ordinary (a sample without a finite value, far away, or stalled) is left to the ordinary
loop, which solves it from the start, with the outcome that it always has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from solvers.core.guards.native import native_steps
from solvers.core.loop import DIVERGENCE, PATIENCE
from solvers.core.problem import Problem
from solvers.core.rows import MODERATE_ABOVE, Point, scatter_rows, where_rows
from solvers.core.solution import Solution
from solvers.core.solver import Solver
from solvers.core.tolerance import Tolerance
from solvers.methods.anderson import Anderson
from solvers.methods.forward import Forward
from solvers.native import spare
from solvers.native.process import THREADS
from solvers.native.steps import MOST, Ring, Steps, Turn, number

LEFT = -2  # status of a sample that the ordinary loop must solve: a rejected step, no finite value
SMALL = 1 << 14  # numbers of a batch for which it is not worth while to let finished samples leave
Ordinary = Callable[[Problem, Tensor], Solution]


def takes_turns(solver: Solver) -> bool:
    """Whether the solver's steps exist in C++."""
    return type(solver) is Forward or (type(solver) is Anderson and solver.memory <= MOST)


def solve_small(
    problem: Problem, first: Point, solver: Solver, tolerance: Tolerance, max_steps: int
) -> Solution | None:
    """The solution after a ``first`` evaluation, whose status may be LEFT; None where turns do not serve.

    They serve a small batch and a map that is nothing but a map, where the user wants C++.
    """
    z = first.z
    if not (takes_turns(solver) and z.numel() <= SMALL and problem.lean_at(z)):
        return None
    steps = native_steps(z)
    if steps is None:
        return None
    start = z.contiguous()
    turns = Turns(start, solver, tolerance, max_steps, None, steps, fresh=True)
    running = turns.take(start + first.residual)
    while running:
        value = problem.lean_value(turns.trial)
        running = turns.take(value.view_as(start))
    return turns.solution(len(start))


class Turns:
    """The state of a solve; tensors have one row a sample, none ever leaves.

    Args:
        fresh: every point is a tensor of its own, as the user's map may keep it.

    Attributes:
        trial: (B, D) where the map is to be evaluated next; :meth:`take` overwrites it unless ``fresh``.
    """

    def __init__(
        self,
        start: Tensor,
        solver: Solver,
        tolerance: Tolerance,
        max_steps: int,
        mask: Tensor | None,
        steps: Steps,
        *,
        fresh: bool = False,
    ) -> None:
        ring = _numbers(solver, start)
        # Within inference mode tensors are made that nobody may change outside of it.
        self._kind = "turns", start.shape, start.dtype, ring[0], torch.is_inference_mode_enabled()
        self._own = own = spare.take(self._kind, lambda: _Memory(start, ring[0]))
        self.steps, self.mask, self._fresh = steps, mask, fresh
        self.trial = start if fresh else own.trial.copy_(start)
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
        turn.trial = turn.next = self.trial.data_ptr()
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
        if not self._fresh:
            return self.steps.turn(self._own.at)
        following = torch.empty_like(trial)
        turn.trial, turn.next = trial.data_ptr(), following.data_ptr()
        self.trial = following
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
        self.turn = turn = Turn(Ring(*(ring or [None] * 5)))
        turn.residual, turn.limit, turn.milestone = residual, limit, milestone
        turn.batch, turn.size, turn.patience = batch, size, PATIENCE
        turn.moderate, turn.divergence = MODERATE_ABOVE[start.dtype], DIVERGENCE
        self.at, self.numbers = ctypes.addressof(turn), sum(sizes)


def solve_left(problem: Problem, start: Tensor, solution: Solution, ordinary: Ordinary) -> None:
    """Solve for the samples that are LEFT from the start, and write what is found into ``solution``."""
    if int(solution.status.min()) >= 0:
        return
    left = solution.status == LEFT
    batch = start.shape[0]
    plain = replace(problem, programs=None)
    rows = torch.nonzero(left).flatten()
    if problem.compact and rows.numel() < batch:
        found = ordinary(plain.rows(rows, batch), start.index_select(0, rows))
        found = replace(
            found,
            **{
                name: scatter_rows(getattr(found, name), rows, batch, 0)
                for name in _ROWS
                if getattr(found, name) is not None
            },
        )
    else:
        found = ordinary(plain, start)
    for name in _ROWS:
        new, old = getattr(found, name), getattr(solution, name)
        if new is not None and old is not None:
            setattr(solution, name, where_rows(left, new, old))


_ROWS = ("value", "status", "residual", "residual_norm", "steps", "evaluations", "energy")

"""Krylov methods in C++: cycles of GMRES, and whole solves of small systems."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from solvers.core.arrays import Array
from solvers.core.solution import Solution
from solvers.native.process import THREADS
from solvers.native.steps import Cycle, Steps, address
from solvers.native.systems import GOES_ON, SOLVED, Limits, Systems


class Run(Protocol):
    """What C++ reads and writes of a :class:`solvers.krylov.gmres.GMRESRun`."""

    direction: Tensor
    basis: Array
    running: Array
    residual_norm: Array
    step: int
    floor: float
    tiny: float


# Arrays of a run, in the order of their addresses; None is set at every call.
_KEPT = ("basis", "hessenberg", "rotation", "null", "residual_norm", "matrix_norm", "limit", "beta", None,
         "broken", "columns", "used")  # fmt: skip


class Cycles:
    """Calls for one run, with the addresses of the arrays that stay where they are."""

    def __init__(self) -> None:
        self._cycle: Cycle | None = None
        self._basis: Array = None  # of the run whose addresses are known
        self._running: Array = None

    def absorb(self, run: Run, steps: Steps, product: Tensor, of_one_minus: bool) -> Tensor:
        """The direction (n, D) after a ``product``; with ``of_one_minus`` it is one with M of I - M."""
        following = torch.empty_like(run.direction)
        cycle = self._of(run)
        cycle.product, cycle.next = product.data_ptr(), following.data_ptr()
        cycle.of_one_minus = of_one_minus
        steps.absorb(ctypes.addressof(cycle))
        return following

    def finish(self, run: Run, steps: Steps) -> tuple[Tensor, Array]:
        """The solution (n, D) and its residual norm (n, 1)."""
        solution, left = torch.empty_like(run.direction), numpy.empty_like(run.residual_norm)
        steps.finish(ctypes.addressof(self._of(run)), solution.data_ptr(), address(left))
        return solution, left

    def _of(self, run: Any) -> Cycle:
        cycle = self._cycle
        if cycle is None or self._basis is not run.basis:  # other rows, or a larger capacity
            kept = [address(None if name is None else getattr(run, name)) for name in _KEPT]
            rows, size = run.direction.shape
            numbers = (rows, size, run.basis.shape[1], 0, False, run.floor, run.tiny)
            cycle = Cycle(None, None, None, *kept, THREADS.fork, THREADS.number, *numbers)
            self._cycle, self._basis, self._running = cycle, run.basis, None
        if self._running is not run.running:
            run.running = self._running = run.running.copy()  # C++ writes to it
            cycle.running = address(run.running)
        cycle.direction, cycle.step = run.direction.data_ptr(), run.step
        return cycle


def solve_in_native(
    image: Callable[[Tensor], Tensor],
    right: Tensor,
    limits: Limits,
    restart: int | None,
    max_steps: int,
    steps: Steps,
) -> Solution | None:
    """``v - image(v) = right`` for all samples (B, D); None where one of them was not solved.

    By GMRES with ``restart``, or by conjugate gradients.
    """
    systems = Systems(right.contiguous(), restart, limits, steps)
    if systems.running < 0:
        return None
    spent = 0
    while True:
        most = min(systems.restart or max_steps, max_steps - spent)
        while systems.running and systems.step < most:
            # A hook in the user's map may keep what it is given, and the next direction comes in its place.
            systems.absorb(image(systems.direction.clone()).detach())
        u = systems.correct()
        if systems.settled():
            break
        spent += systems.step + 1
        if spent > max_steps:
            return None
        outcome = systems.verify(image(u.clone()).detach())
        if outcome == SOLVED:
            break
        if outcome != GOES_ON or spent >= max_steps:
            return None
    systems.close()
    return Solution(
        value=u,
        status=torch.zeros_like(systems.steps),  # CONVERGED
        residual=systems.relative,
        residual_norm=systems.size,
        steps=systems.steps,
        evaluations=systems.products,
    )

"""What a solver is: immutable hyperparameters, a state record, and functions on it.

The loop (:mod:`solvers.core.loop`) evaluates; a solver only proposes where to evaluate next::

    state = solver.init(point, problem)  # after the first evaluation
    candidate = solver.step(state, turn)  # after every evaluation

All vectors are (B, D) and every row is a problem of its own: a solver never mixes rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from solvers.core.problem import Problem
from solvers.core.rows import Point
from solvers.core.solution import Solution, Status
from solvers.core.tolerance import Tolerance


@dataclass
class Turn:
    """What a solver is told after an evaluation."""

    current: Point  # the last accepted point of every row
    trial: Point  # the point just evaluated; rejected rows may hold non-finite numbers
    accepted: Tensor | None  # (B,) bool, or None where every row was accepted
    rejections: Tensor  # (B,) consecutive rejections of the row, this one included
    problem: Problem  # of the rows that are left
    max_steps: int  # evaluations that a sample may spend in the whole solve


class Solver(ABC):
    """Base of all solvers; subclasses are frozen dataclasses of hyperparameters."""

    needs_energy: ClassVar[bool] = False  # a minimiser, which works with an energy only
    # The solver chooses the next trial of a rejected row itself (a line search); otherwise the loop
    # takes a shortened step along the residual.
    searches: ClassVar[bool] = False
    lost: ClassVar[Status] = Status.NONFINITE  # of a row whose trials were all not finite

    @abstractmethod
    def init(self, point: Point, problem: Problem) -> Any:
        """State record after the first evaluation."""

    @abstractmethod
    def step(self, state: Any, turn: Turn) -> Tensor:
        """Next point to evaluate, (B, D); ``state`` is the record made by ``init``, changed in place."""

    def products(self, state: Any) -> Tensor | None:
        """(B,) int64 evaluations made beside the loop's (products with the Jacobian), or None."""
        return None


class ExternalSolver(Solver):
    """A solver with a loop of its own; it reports what it did as a :class:`solvers.Solution`."""

    @abstractmethod
    def run(
        self,
        problem: Problem,
        start: Tensor,
        tolerance: Tolerance,
        max_steps: int,
        states_at: Sequence[int],
    ) -> Solution:
        """Solve from ``start`` (B, D); with ``states`` after these numbers of evaluations, if any."""

    def init(self, point: Point, problem: Problem) -> Any:
        raise TypeError(f"{type(self).__name__} has its own loop and cannot be stepped")

    def step(self, state: Any, turn: Turn) -> Tensor:
        raise TypeError(f"{type(self).__name__} has its own loop and cannot be stepped")

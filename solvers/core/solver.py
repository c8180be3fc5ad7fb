"""What a solver is: immutable hyperparameters, a state record, and two functions.

The loop (:mod:`solvers.fixed_point`) evaluates; a solver only proposes where to evaluate next::

    state = solver.init(point)  # after the first evaluation
    candidate = solver.step(state, turn)  # after every further one

All vectors are (B, D) and every row is a problem of its own: a solver never mixes rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from solvers.core.rows import Point
from solvers.core.solution import Status


@dataclass
class Turn:
    """What a solver is told after an evaluation.

    Attributes:
        current: the current iterate of every row: the trial where it was accepted, else the last
            accepted point.
        trial: the point just evaluated; rejected rows may hold non-finite numbers.
        accepted: (B,) bool, or None where every row was accepted.
        problem: the problem of the rows that are left.
    """

    current: Point
    trial: Point
    accepted: Tensor | None
    problem: Linearizable


class Solver(ABC):
    """Base of all solvers; subclasses are frozen dataclasses of hyperparameters.

    Class attributes:
        needs_energy: the solver is a minimiser and works with an energy only.
        searches: the solver chooses the next trial of a rejected row itself (a line search);
            otherwise the loop falls back to a backtracked plain step.
        lost: status of a row that has only non-finite evaluations ahead of it.
    """

    needs_energy: ClassVar[bool] = False
    searches: ClassVar[bool] = False
    lost: ClassVar[Status] = Status.NONFINITE

    @abstractmethod
    def init(self, point: Point, problem: Linearizable) -> Any:
        """State record after the first evaluation."""

    @abstractmethod
    def step(self, state: Any, turn: Turn) -> Tensor:
        """Next point to evaluate, (B, D); ``state`` is the record made by ``init``, changed in place."""


class ExternalSolver(Solver):
    """A solver with a loop of its own; it reports what it did as a :class:`solvers.Solution`."""

    @abstractmethod
    def run(self, problem: Any, start: Tensor, tolerance: Any, max_steps: int) -> Any:
        """Solve from ``start`` (B, D) for a :class:`solvers.core.problem.Problem`."""

    def init(self, point: Point, problem: Linearizable) -> Any:
        raise TypeError(f"{type(self).__name__} has its own loop and cannot be stepped")

    def step(self, state: Any, turn: Turn) -> Tensor:
        raise TypeError(f"{type(self).__name__} has its own loop and cannot be stepped")


class Linearizable(ABC):
    """What a Newton method asks of the problem: products with the Jacobian of ``f`` at a point."""

    symmetric: bool
    max_steps: int
    compact: bool

    @abstractmethod
    def rows(self, index: Tensor, batch: int) -> Linearizable:
        """The same problem on the rows ``index`` of a batch of ``batch``."""

    @abstractmethod
    def jacobian_product(self, z: Tensor) -> Callable[[Tensor], Tensor]:
        """Map v (B, D) -> J(z) v (B, D)."""

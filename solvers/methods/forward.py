"""Forward (Picard) iteration."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from solvers.core.checks import require_number
from solvers.core.problem import Problem
from solvers.core.rows import Point
from solvers.core.solver import Solver, Turn


@dataclass(frozen=True)
class Forward(Solver):
    """Damped Picard (Krasnoselskii-Mann) iteration ``z <- (1 - damping) z + damping f(z)``.

    Args:
        damping: in (0, 2]; 1 is the iteration ``z <- f(z)``.
    """

    damping: float = 1.0

    def __post_init__(self) -> None:
        require_number("damping", self.damping, low=0.0, high=2.0, closed=False)

    def init(self, point: Point, problem: Problem) -> None:
        """Nothing to remember."""

    def step(self, state: None, turn: Turn) -> Tensor:
        return turn.current.z.add(turn.current.residual, alpha=self.damping)

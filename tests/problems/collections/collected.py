"""What a collected problem is, and how one is posed as a fixed point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import solvers

Kind = Literal["map", "system", "minimiser"]
TOLERANCE = 1e-6
# a solver whose threshold is relative to |f(z)| instead of |z| must not miss by that
ROUNDING = 1e-5
BUDGET = 500


@dataclass(frozen=True, eq=False)
class Collected:
    """A textbook problem as its source states it, float64, with its standard start.

    Attributes:
        kind: ``map`` (``z = function(z)``), ``system`` (``function(z) = 0``, posed as
            ``z = z - function(z)``) or ``minimiser`` (the least ``function(z)``, posed as
            ``z = z - gradient``).
        name: in the collection.
        function: (B, n) -> (B, n), for a minimiser (B, n) -> (B,); row by row.
        start: the published start, n numbers.
        source: the paper and its number, or the library's test.
        solution: a fixed point, root or minimiser that the source names or that has a closed form.
        minimum: the least value that the source names, of a minimiser.
    """

    kind: Kind
    name: str
    function: Callable[[Tensor], Tensor]
    start: Sequence[float]
    source: str
    solution: Sequence[float] | None = None
    minimum: float | None = None

    @property
    def dim(self) -> int:
        """Number of unknowns n."""
        return len(self.start)

    @property
    def z0(self) -> Tensor:
        """The start as a batch of one, (1, n)."""
        return torch.tensor([list(self.start)], dtype=torch.float64)

    def f(self, z: Tensor) -> Tensor:
        """The map whose fixed points are the answers, (B, n) -> (B, n)."""
        if self.kind == "map":
            return self.function(z)
        if self.kind == "system":
            return z - self.function(z)
        with torch.enable_grad():
            point = z.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.function(point).sum(), point)
        return z.detach() - gradient

    def posed(self) -> Any:
        """What :func:`solvers.fixed_point` gets: the map, or the descent of the energy."""
        return solvers.Descent(self.function) if self.kind == "minimiser" else self.f


def residual(problem: Collected, z: Tensor) -> float:
    """``|f(z) - z| / max(1, |z|)`` of z (1, n), computed in float64; infinite where not finite."""
    z = z.detach().double()
    value = float((problem.f(z) - z).norm() / z.norm().clamp_min(1))
    return value if value == value else float("inf")


def solved(problem: Collected, z: Tensor) -> bool:
    """The criterion for every method: ``|f(z) - z| <= 1e-6 max(1, |z|)``, recomputed."""
    return residual(problem, z) <= TOLERANCE * (1 + ROUNDING)


def run(problem: Collected, solver: solvers.Solver | None = None) -> solvers.Solution:
    """Our solver on a problem, with the tolerance and the budget of the comparison."""
    return solvers.fixed_point(
        problem.posed(), problem.z0, solver=solver,
        tolerance=solvers.Tolerance(TOLERANCE, TOLERANCE), max_steps=BUDGET, adjoint=None,
        on_failure="ignore",
    )  # fmt: skip

"""The criterion of convergence, and what half precision can meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.core.checks import require_nonnegative

# rtol that maps evaluated in half precision meet: a few roundings of the state, amplified by 1 / (1 - J)
_HALF = {torch.bfloat16: 2e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Tolerance:
    """A sample has converged where ``|residual| <= max(atol, rtol * |reference|)`` (Euclidean norms).

    The reference is ``f(z)`` for a fixed point and the right-hand side for a linear system, so the
    default is scale-free. A fixed point at zero has no scale: give ``atol`` there.

    Args:
        rtol: relative part, finite and >= 0.
        atol: absolute part, finite and >= 0.

    Raises:
        ValueError: if one is negative, infinite or not a number.
    """

    rtol: float = 1e-4
    atol: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            require_nonnegative(name, getattr(self, name))

    def threshold(self, reference: Tensor) -> Tensor:
        """Largest residual norm that counts as converged, (B,), for reference norms (B,)."""
        limit = reference * self.rtol
        return limit.clamp_min(self.atol) if self.atol else limit


def criterion(
    tolerance: Tolerance | None, state: torch.dtype, autocast: torch.dtype | None
) -> tuple[Tolerance, str]:
    """The tolerance of a fixed-point solve, and a name of the solve for messages.

    None: ``Tolerance()``, and where the map computes in half precision, by the dtype of its state or
    by autocast, an rtol that it can meet. A smaller one that was asked for is kept; the name then says
    that it may be out of reach.
    """
    # autocast leaves float64 alone
    precision = state if autocast is None or state == torch.float64 else autocast
    if tolerance is None:
        tolerance = Tolerance(rtol=_HALF.get(precision, Tolerance.rtol))
    what = "fixed-point solve"
    if tolerance.rtol < _HALF.get(precision, 0.0) and not tolerance.atol:
        name = str(precision).removeprefix("torch.")
        what = f"{what} in {name}, which may not reach rtol={tolerance.rtol:g},"
    return tolerance, what

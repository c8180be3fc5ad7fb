"""The criterion of convergence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from solvers.core.checks import require_nonnegative


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

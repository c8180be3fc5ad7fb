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


def evaluation_dtype(state: torch.dtype, autocast: torch.dtype | None) -> torch.dtype:
    """The precision of a map on a state of this dtype, under autocast to ``autocast`` if not None.

    Autocast leaves float64 alone.
    """
    return state if autocast is None or state == torch.float64 else autocast


def default_tolerance(precision: torch.dtype) -> Tolerance:
    """``Tolerance()``, and in half precision what a map can meet: rtol 2e-2 (bfloat16), 1e-2 (float16)."""
    return Tolerance(rtol=_HALF[precision]) if precision in _HALF else Tolerance()


def name_of_solve(what: str, tolerance: Tolerance, precision: torch.dtype) -> str:
    """``what`` for a message, and that ``tolerance`` may be out of reach in this precision."""
    if precision not in _HALF or tolerance.rtol >= _HALF[precision]:
        return what
    name = str(precision).removeprefix("torch.")
    return f"{what} in {name}, which may not reach rtol={tolerance.rtol:g},"

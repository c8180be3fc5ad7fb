"""The criterion of convergence, and what half precision can meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from solvers.core.checks import require_instance, require_nonnegative
from solvers.core.modes import uncompiled

# rtol that maps evaluated in half precision meet: a few roundings of the state, amplified by 1 / (1 - J)
_HALF = {torch.bfloat16: 2e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Tolerance:
    """A sample has converged where ``|residual| <= max(atol, rtol * |reference|)`` (Euclidean norms).

    The reference is ``f(z)`` for a fixed point and the right-hand side for a linear system, so the
    default is scale-free. A fixed point at zero has no scale: give ``atol`` there.

    Args:
        rtol: relative part, a finite number >= 0.
        atol: absolute part, a finite number >= 0.

    Raises:
        TypeError: if one is no number.
        ValueError: if one is negative, infinite or not a number.

    Example:
        >>> import torch
        >>> Tolerance(rtol=1e-3).threshold(torch.tensor([1.0, 200.0]))
        tensor([0.0010, 0.2000])
    """

    rtol: float = 1e-4
    atol: float = 0.0

    def __post_init__(self) -> None:
        require_nonnegative("rtol", self.rtol)
        require_nonnegative("atol", self.atol)

    def threshold(self, reference: Tensor) -> Tensor:
        """Largest residual norm that counts as converged, (B,), for reference norms (B,)."""
        limit = reference * self.rtol
        return limit.clamp_min(self.atol) if self.atol else limit

    def of_adjoint(self, fallback: float) -> Tolerance:
        """The tolerance of the adjoint: ``rtol`` alone, ``fallback`` where that is 0."""
        return Tolerance(rtol=self.rtol or fallback)


def read_tolerance(name: str, value: Any) -> Tolerance | None:
    """A :class:`Tolerance`, whose ``rtol`` a plain number is; None stays None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Tolerance(rtol=require_nonnegative(name, value))
    expected = "a number (rtol), a solvers.Tolerance"
    return require_instance(name, value, Tolerance, expected, optional=True)


def criterion(
    tolerance: Tolerance | None, state: torch.dtype, autocast: torch.dtype | None, used: bool = True
) -> tuple[Tolerance, str]:
    """The tolerance of a fixed-point solve, and a name of the solve for messages.

    None: ``Tolerance()``, and where the map computes in half precision, by the dtype of its state or
    by an autocast that it has ``used``, an rtol that it can meet. A smaller one that was asked for is
    kept; the name then says that it may be out of reach.
    """
    # autocast leaves float64 alone
    changed = used and state != torch.float64
    precision = state if autocast is None or not changed else autocast
    if tolerance is None:
        tolerance = Tolerance(rtol=_HALF.get(precision, Tolerance.rtol))
    what = "fixed-point solve"
    if precision in _HALF and not tolerance.atol and tolerance.rtol < _HALF[precision]:
        name = str(precision).removeprefix("torch.")
        what = f"{what} in {name}, which may not reach rtol={tolerance.rtol:g},"
    return tolerance, what


class Goal:
    """The tolerance of one fixed-point solve, which may depend on what its first evaluation does."""

    def __init__(
        self, given: Tolerance | None, state: torch.dtype, autocast: torch.dtype | None
    ) -> None:
        self.given, self.state, self.autocast = given, state, autocast
        self.used = True  # what autocast offers, as long as nobody has looked

    @property
    def tolerance(self) -> Tolerance:
        return criterion(self.given, self.state, self.autocast, self.used)[0]

    @property
    def what(self) -> str:
        """A name of the solve for messages."""
        return criterion(self.given, self.state, self.autocast, self.used)[1]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, an evaluation shows whether autocast matters to it."""
        if self.given is not None or self.autocast is None or self.state == torch.float64:
            yield
            return
        watch = _HalfWatch()
        # A compiler would take the watch for a part of the evaluation.
        with uncompiled(), watch:
            yield
        self.used = watch.found


class _HalfWatch(TorchFunctionMode):
    """Notes whether something is computed in half precision: autocast leaves sums and powers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.found:
            leaves = pytree.tree_leaves(result)
            self.found = any(isinstance(t, Tensor) and t.dtype in _HALF for t in leaves)
        return result

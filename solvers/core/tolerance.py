"""The tolerance of a solve, and where it gives way: in half precision and TF32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from solvers.core.checks import plain_number, require_count, require_instance, require_positive
from solvers.core.cuda import on_cuda, uses_tf32
from solvers.core.modes import uncompiled

# rtol that maps evaluated in half precision meet: a few roundings of the state, amplified by 1 / (1 - J)
HALF = {torch.bfloat16: 2e-2, torch.float16: 1e-2}
# The same where a CUDA device multiplies float32 numbers in TF32, which rounds the factors like float16 and
# the results like float32. On an H100 the residuals of blocks with initial weights fall to 3e-5; the solution
# is wrong by the rounding of the factors, 5e-4, all the same.
_TF32 = 2e-3


@dataclass(frozen=True)
class Tolerance:
    """What residual and estimated error may be: ``max(atol, rtol * |reference|)`` in Euclidean norms.

    The reference is ``f(z)`` for a fixed point, ``z`` for a minimum of an energy or a root, and the
    right-hand side for a linear system, so the default is independent of scale. Set ``atol`` if the fixed
    point may be zero. For energies and roots ``rtol=0`` compares the residual alone with ``atol``.

    Args:
        rtol: relative tolerance, a finite number >= 0.
        atol: absolute tolerance, a finite number >= 0.
        patience: number of evaluations in which a sample must make progress, an integer >= 1: it ends as
            STALLED if meanwhile its residual, relative to what is allowed, has not fallen by 0.1 % below the
            best before, its energy has not fallen, and its iterate has not kept to one direction. None:
            samples go on up to ``max_steps``. Linear solvers have rules of their own.

    Raises:
        TypeError: if a tolerance is not a number, or patience is not an integer.
        ValueError: if a tolerance is negative, infinite or NaN, or patience is below 1.

    Example:
        >>> import torch
        >>> Tolerance(rtol=1e-3).threshold(torch.tensor([1.0, 200.0]))
        tensor([0.0010, 0.2000])
    """

    rtol: float = 1e-4
    atol: float = 0.0
    patience: int | None = field(default=100, kw_only=True)

    def __post_init__(self) -> None:
        require_positive("rtol", self.rtol, zero=True)
        require_positive("atol", self.atol, zero=True)
        if self.patience is not None:
            require_count("patience", self.patience)

    def threshold(self, reference: Tensor) -> Tensor:
        """Return the largest residual norm (B,) that counts as converged for reference norms (B,)."""
        limit = reference * self.rtol
        return limit.clamp_min(self.atol) if self.atol else limit


@dataclass(frozen=True)
class Limits:
    """A tolerance of numbers () on a device, which a recorded turn reads anew each time."""

    rtol: Tensor
    atol: Tensor

    def threshold(self, reference: Tensor) -> Tensor:
        """As :meth:`Tolerance.threshold`."""
        return torch.maximum(reference * self.rtol, self.atol)


def read_tolerance(name: str, value: Any) -> Tolerance | None:
    """Return a :class:`Tolerance` from an instance or a number, its ``rtol``; None stays None."""
    if value is None or isinstance(value, Tolerance):
        return value
    value = plain_number(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Tolerance(rtol=require_positive(name, value, zero=True))
    expected = "a number (rtol), a solvers.Tolerance"
    return require_instance(name, value, Tolerance, expected, optional=True)


class UsualTolerance(Tolerance):
    """A default, which gives way in reduced precision: rtol is then one that the precision can meet."""


_DEFAULT = UsualTolerance()


class Goal:
    """The tolerance of one fixed-point solve, resolved for the precision in which ``f`` computes.

    ``precision`` is that of the state, of an autocast that ``f`` uses, or TF32, where matrix products of
    float32 use it on a CUDA ``device``. Where that cannot meet a tolerance of the user's, the tolerance
    remains, and ``what``, the name of the solve for messages, says that it may be out of reach.
    """

    def __init__(
        self, given: Tolerance | None, state: torch.dtype, autocast: torch.dtype | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.given, self.state, self.device = given or _DEFAULT, state, device
        self.usual = isinstance(self.given, UsualTolerance)
        # autocast leaves float64 alone
        self.autocast = None if state == torch.float64 else autocast
        self.vanishing = False  # an unsolved sample seems to have its fixed point at zero
        self.resolve(self.autocast is not None)

    def resolve(self, used: bool) -> None:
        """Resolve again, now that it is known whether ``f`` has ``used`` the autocast."""
        self.used = used
        self.precision = self.autocast if used and self.autocast is not None else self.state
        name, least = str(self.precision).removeprefix("torch."), HALF.get(self.precision, 0.0)
        if self.precision == torch.float32 and on_cuda(self.device) and uses_tf32():
            name, least = "TF32", _TF32
        self.tolerance, self.what = self.given, "fixed-point solve"
        if self.usual and self.tolerance.rtol < least:
            self.tolerance = replace(self.tolerance, rtol=least)
        if not self.tolerance.atol and self.tolerance.rtol < least:
            self.what += f" in {name}, which may not reach rtol={self.tolerance.rtol:g},"

    def allowed(self, unit_free: bool) -> Tolerance:
        """The tolerance for the residual of a returned value, which may be in units of its own."""
        return Tolerance(0.0, self.tolerance.atol) if unit_free else self.tolerance

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, an evaluation shows whether autocast matters to it."""
        if self.autocast is None or not self.usual:
            yield
            return
        watch = _HalfWatch()
        # A compiler would take the watch for a part of the evaluation.
        with uncompiled(), watch:
            yield
        self.resolve(watch.found)


class _HalfWatch(TorchFunctionMode):
    """Notes whether something is computed in half precision: autocast leaves sums and powers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.found:
            leaves = pytree.tree_leaves(result)
            self.found = any(isinstance(t, Tensor) and t.dtype in HALF for t in leaves)
        return result

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

from solvers.core.checks import require_nonnegative
from solvers.core.modes import uncompiled

# rtol that maps evaluated in half precision meet: a few roundings of the state, amplified by 1 / (1 - J)
_HALF = {torch.bfloat16: 2e-2, torch.float16: 1e-2}


@dataclass(frozen=True, eq=False)
class Tolerance:
    """A sample has converged where ``|residual| <= max(atol, rtol * |reference|)`` (Euclidean norms).

    The reference is ``f(z)`` for a fixed point and the right-hand side for a linear system, so the
    default is scale-free. A fixed point at zero has no scale: give ``atol`` there.

    Either part may be a tensor (B,), a tolerance for each sample of a batch of B, of any floating
    dtype; it is copied. Two tolerances are equal where all of their numbers are.

    Args:
        rtol: relative part, finite and >= 0, a number or a tensor (B,).
        atol: absolute part, finite and >= 0, a number or a tensor (B,).

    Raises:
        TypeError: if one is neither a number nor a floating tensor.
        ValueError: if one is negative, infinite or not a number, or a tensor of another shape.

    Example:
        >>> import torch
        >>> Tolerance(rtol=1e-3).threshold(torch.tensor([1.0, 200.0]))
        tensor([0.0010, 0.2000])
    """

    rtol: float | Tensor = 1e-4
    atol: float | Tensor = 0.0

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            part = getattr(self, name)
            if isinstance(part, Tensor):
                object.__setattr__(self, name, _own_numbers(name, part))
            else:
                require_nonnegative(name, part)
        sizes = [len(part) for part in self._tensors()]
        if len(set(sizes)) > 1:
            raise ValueError(f"rtol and atol must be of one batch, got {sizes[0]} and {sizes[1]}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tolerance):
            return NotImplemented
        pairs = ((self.rtol, other.rtol), (self.atol, other.atol))
        return all(_same(mine, theirs) for mine, theirs in pairs)

    def __hash__(self) -> int:
        parts = (self.rtol, self.atol)
        return hash(tuple(p.shape if isinstance(p, Tensor) else p for p in parts))

    def _tensors(self) -> list[Tensor]:
        return [part for part in (self.rtol, self.atol) if isinstance(part, Tensor)]

    @property
    def per_sample(self) -> bool:
        """Whether samples have tolerances of their own."""
        return bool(self._tensors())

    @property
    def relative(self) -> bool:
        """Whether there is no absolute part, in no sample."""
        return not isinstance(self.atol, Tensor) and not self.atol

    def threshold(self, reference: Tensor) -> Tensor:
        """Largest residual norm that counts as converged, (B,), for reference norms (B,)."""
        limit = reference * _like(self.rtol, reference)
        return limit if self.relative else limit.clamp_min(_like(self.atol, reference))

    def threshold_of(self, reference: Any) -> Any:
        """:meth:`threshold` of a NumPy array."""
        if isinstance(self.rtol, Tensor) or not self.relative:
            return self.threshold(torch.from_numpy(reference)).numpy()
        return reference * self.rtol

    def least(self, like: Tensor) -> float | Tensor:
        """``atol``, a tensor on the device and in the dtype of ``like``."""
        return _like(self.atol, like)

    def rows(self, index: Tensor | None) -> Tolerance:
        """The tolerance of the samples ``index`` (n,), None for all of them."""
        if index is None or not self.per_sample:
            return self
        parts = (_like(part, index, dtype=False) for part in (self.rtol, self.atol))
        return Tolerance(*(p.index_select(0, index) if isinstance(p, Tensor) else p for p in parts))

    def of_adjoint(self, fallback: float) -> Tolerance:
        """The tolerance of the adjoint: ``rtol`` alone, ``fallback`` where that is 0."""
        if not isinstance(self.rtol, Tensor):
            return Tolerance(rtol=self.rtol or fallback)
        return Tolerance(rtol=self.rtol.masked_fill(self.rtol == 0, fallback))

    def check_batch(self, name: str, batch: int) -> None:
        """Raise ValueError naming the argument unless there is one tolerance a sample, or one for all."""
        for part in self._tensors():
            if len(part) != batch:
                raise ValueError(
                    f"{name} must hold one number for each of {batch} samples, got {len(part)}"
                )

    def require_one(self, name: str, where: str) -> float:
        """``rtol``; ValueError where samples have their own tolerances, which ``where`` does not know."""
        if isinstance(self.rtol, Tensor) or self.per_sample:
            raise ValueError(f"{name} must be one number for all samples {where}, got one for each")
        return self.rtol


def check_tolerances(tolerance: Tolerance | None, adjoint: object, batch: int | None) -> None:
    """Raise ValueError unless those of a solve and its adjoint fit ``batch`` samples, or are one for all.

    None: the batch is not known, as inside of a transform.
    """
    named = {"tolerance": tolerance, "adjoint.tolerance": getattr(adjoint, "tolerance", None)}
    for name, each in named.items():
        if each is not None and batch is None:
            each.require_one(name, "inside of torch.func's transforms")
        elif each is not None and batch is not None:
            each.check_batch(name, batch)


def _own_numbers(name: str, part: Tensor) -> Tensor:
    if not part.is_floating_point():
        raise TypeError(f"{name} must be a number or of a floating dtype, got {part.dtype}")
    if part.dim() != 1 or part.numel() == 0:
        raise ValueError(f"{name} must be a number or of shape (B,), got {tuple(part.shape)}")
    own = part.detach().clone()
    if not bool((torch.isfinite(own) & (own >= 0)).all()):
        raise ValueError(
            f"{name} must be finite and >= 0 for every sample, got {own.tolist()[:10]}"
        )
    return own


def _same(first: float | Tensor, second: float | Tensor) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.device == second.device and torch.equal(first, second)
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return False
    return first == second


def _like(part: float | Tensor, like: Tensor, dtype: bool = True) -> float | Tensor:
    """A tensor on the device (and, unless told otherwise, in the dtype) of ``like``."""
    if not isinstance(part, Tensor):
        return part
    return part.to(like.device, like.dtype) if dtype else part.to(like.device)


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
    if precision in _HALF and tolerance.relative:
        least = float(torch.as_tensor(tolerance.rtol).min())
        if least < _HALF[precision]:
            name = str(precision).removeprefix("torch.")
            what = f"{what} in {name}, which may not reach rtol={least:g},"
    return tolerance, what


class Goal:
    """The tolerance of one fixed-point solve, which may depend on what its first evaluation does."""

    def __init__(
        self, given: Tolerance | None, state: torch.dtype, autocast: torch.dtype | None
    ) -> None:
        self.given, self.state, self.autocast = given, state, autocast
        self.used = True  # what autocast offers, as long as nobody has looked

    def rows(self, index: Tensor) -> Goal:
        """The goal of the samples ``index`` (n,)."""
        if self.given is None or not self.given.per_sample:
            return self
        return Goal(self.given.rows(index), self.state, self.autocast)

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

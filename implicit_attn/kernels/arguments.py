"""Common handling of the attention kernels' arguments: transforms, pairs, masks, precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from solvers.core import modes

Options = ParamSpec("Options")
Result = TypeVar("Result")

# exp of scores within this bound, and sums of them over any number of tokens, stay in float32.
LARGEST_EXPONENT = 60.0
ORDINARY = (Tensor, torch.nn.Parameter)
_FUNCTORCH: Any = torch._C._functorch  # type: ignore[attr-defined]
_DIFFERENTIATING = (_FUNCTORCH.TransformType.Grad, _FUNCTORCH.TransformType.Jvp)
_SHAPES = "(N, M), (B, N, M) or (B, H, N, M), M = N in self-attention"


@dataclass(frozen=True)
class Choice:
    """Result of ``explain``: the name of a backend, such as "reference", and the reason."""

    backend: str
    reason: str


# --- what surrounds a call: transforms, forward mode, export --------------------------------------


def differentiated() -> bool:
    """Return whether ``torch.func`` differentiates, which custom operators do not support."""
    if torch.compiler.is_compiling() or not modes.in_transform():
        return False
    return any(each.key() in _DIFFERENTIATING for each in _FUNCTORCH.get_interpreter_stack())


def has_tangent(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has a forward-mode tangent."""
    if getattr(forward_ad, "_current_level", -1) < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


def traced(*tensors: Tensor) -> bool:
    """Return whether a compiler, a transform or forward mode is at work, which hide or extend the values."""
    if torch.compiler.is_compiling() or modes.in_transform():
        return True
    return any(map(has_tangent, tensors))


def dense_for_transforms(*tensors: Tensor) -> Choice | None:
    """Return the dense formula if no other backend supports the active differentiation, else None."""
    if torch.compiler.is_exporting():
        return Choice("reference", "inside torch.export, which supports standard operators only")
    if any(map(has_tangent, tensors)):
        return Choice("reference", "only the dense formula supports forward-mode differentiation")
    if differentiated():
        return Choice("reference", "inside torch.func.grad, which differentiates the dense formula")
    return None


def attention_for_transforms(*tensors: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which ``scaled_dot_product_attention`` supports the active differentiation."""
    transformed = differentiated() or any(map(has_tangent, tensors))
    return modes.PLAIN_ATTENTION if transformed else nullcontext()


def refuse_transforms(backend: str, *tensors: Tensor) -> None:
    """Raise NotImplementedError if only the dense formula supports the active differentiation."""
    if differentiated() or any(map(has_tangent, tensors)):
        raise NotImplementedError(
            f'forward mode, torch.func.grad, vjp and jvp are not implemented for backend="{backend}"; '
            'use torch.autograd or backend="reference"'
        )


# --- pairs of a query and a key -------------------------------------------------------------------


class Pairs(NamedTuple):
    """Pairs of queries and keys, each part (B or 1, H or 1, N, M).

    Attributes:
        allowed: bool, True if query i may attend to key j; None for all.
        bias: floating-point, added to the scores ``beta q_i.k_j``; None for zero.
    """

    allowed: Tensor | None = None
    bias: Tensor | None = None

    def intersect(self, allowed: Tensor | None) -> Pairs:
        """Restrict the pairs to those in ``allowed`` (broadcastable, bool)."""
        if allowed is None:
            return self
        both = allowed if self.allowed is None else self.allowed & allowed
        return Pairs(both, self.bias)


def check_pairs(
    pairs: Tensor | None, bias: Tensor | None, shape: tuple[int, int, int, int], name: str = "bias"
) -> Pairs | None:
    """Return ``pairs`` (bool) and ``bias`` (floating-point) with four dimensions each, or None.

    Args:
        shape: (B, H, N, M), to which they must broadcast.
        name: name of the bias in errors.

    Raises:
        TypeError, ValueError: if a dtype or shape is invalid.
    """
    if pairs is None and bias is None:
        return None
    if pairs is not None and (not isinstance(pairs, Tensor) or pairs.dtype != torch.bool):
        got = pairs.dtype if isinstance(pairs, Tensor) else type(pairs).__name__
        raise TypeError(f"pairs must be a bool tensor {_SHAPES}, got {got}")
    if bias is not None and (not isinstance(bias, Tensor) or not bias.is_floating_point()):
        got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise TypeError(f"{name} must be a floating-point tensor {_SHAPES}, got {got}")
    given = (("pairs", pairs), (name, bias))
    return Pairs(*(None if t is None else _four_dimensional(n, t, shape) for n, t in given))


def _four_dimensional(name: str, tensor: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Reshape (N, M), (B, N, M) or (B, H, N, M) to four dimensions; sizes of 1 are broadcast.

    Raises:
        ValueError: if it does not broadcast to ``shape`` or its last two sizes differ from it.
    """
    wide = tensor
    if tensor.dim() == 2:
        wide = tensor[None, None]
    elif tensor.dim() == 3:
        wide = tensor[:, None]
    fits = wide.dim() == 4 and wide.shape[2:] == shape[2:]
    if not fits or any(own not in (1, size) for own, size in zip(wide.shape, shape, strict=True)):
        batch, heads, queries, keys = shape
        raise ValueError(
            f"{name} must have the shape ({queries}, {keys}), ({batch}, {queries}, {keys}) or "
            f"({batch}, {heads}, {queries}, {keys}), got {tuple(tensor.shape)}"
        )
    return wide


def token_pairs(
    mask: Tensor | None, causal: bool, tokens: int, device: torch.device, own: bool = True
) -> Tensor | None:
    """Return the pairs of unmasked tokens, (B or 1, 1, N, N) bool, or None for all.

    ``causal`` restricts them to ``j <= i``; ``own=False`` excludes ``j = i``.
    """
    pairs = None if mask is None else mask[:, None, :, None] & mask[:, None, None, :]
    if own and not causal:
        return pairs
    every = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    order = every.tril(0 if own else -1) if causal else ~every.tril().triu()
    return order[None, None] if pairs is None else pairs & order


# --- masks and precision --------------------------------------------------------------------------


def within_exponent(limit: float | None) -> bool:
    """Return whether a bound on the absolute scores makes row maxima unnecessary."""
    return limit is not None and limit <= LARGEST_EXPONENT


def wide_dtype(z: Tensor) -> torch.dtype:
    """Return float32 for half precision, else the dtype of ``z``."""
    return torch.promote_types(z.dtype, torch.float32)


def zero_masked(z: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``z`` (B, H, N, p) with zeros at masked tokens, replacing NaN, too."""
    return z if mask is None else z.masked_fill(~mask[:, None, :, None], 0.0)


def without_autocast(
    function: Callable[Concatenate[Tensor, Options], Result],
) -> Callable[Concatenate[Tensor, Options], Result]:
    """Decorate ``function`` to disable autocast on the device of its first argument.

    Autocast would round the scores of float32 tokens, and the lse, to half precision.
    """

    @wraps(function)
    def wrapped(first: Tensor, *args: Options.args, **kwargs: Options.kwargs) -> Result:
        with modes.without_autocast(first.device.type):
            return function(first, *args, **kwargs)

    return wrapped

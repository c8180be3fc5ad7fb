"""Tensors of samples and tokens: their checks, sums over the entries of each sample, masks over tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # such as a value and its gradient


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are taken: float32 for half precision, else ``dtype`` itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def sum_samples(values: Tensor) -> Tensor:
    """(B, ...) -> (B,), accumulated and returned in float32 or wider."""
    if values.dim() == 1:
        return values.to(accumulation_dtype(values.dtype))
    return values.flatten(1).sum(1, dtype=accumulation_dtype(values.dtype))


def sum_squares(values: Tensor) -> Tensor:
    """Squared norm of each sample, (B,), accumulated and returned in float32 or wider."""
    return sum_samples(values.to(accumulation_dtype(values.dtype)).square())


def hide(values: Tensor, mask: Tensor | None) -> Tensor:
    """``values`` (B, N, ...) with zeros where ``mask`` (B, N) is False, NaN replaced too."""
    if mask is None:
        return values
    return values.masked_fill(~mask.reshape(*mask.shape, *[1] * (values.dim() - 2)), 0.0)


def check_values(energy: Any, batch: int, name: str) -> None:
    """``energy`` must be a tensor (B,): one number per sample."""
    if not isinstance(energy, Tensor):
        raise TypeError(f"{name} must return a tensor of shape (B,), got {type(energy).__name__}")
    if tuple(energy.shape) != (batch,):
        got = f"shape {tuple(energy.shape)}" if energy.dim() else "a scalar"
        raise ValueError(
            f"{name} must return one number per sample, shape (B,) = ({batch},), got {got}: sum over "
            "every dimension but the first"
        )


def check_tensor(
    name: str,
    value: Any,
    shape: str,
    *,
    dtype: torch.dtype | None = None,
    finite: bool = True,
    **sizes: int,
) -> Tensor:
    """``value`` must be a floating tensor of the shape ``"N N d d"``, equal letters for equal sizes > 0.

    Args:
        dtype: of the tensor; None: any floating one.
        finite: whether NaN and infinity are refused.
        sizes: of some of the letters; others take any.
    """
    letters = shape.split()
    text = f"({', '.join(letters)}{',' * (len(letters) == 1)})"
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a floating tensor {text}, got {got}")
    if dtype is not None and value.dtype != dtype:
        raise TypeError(f"{name} must be of {dtype}, got {value.dtype}")
    known, given = dict(sizes), tuple(value.shape)
    fits = len(given) == len(letters) and 0 not in given
    if not fits or any(known.setdefault(n, s) != s for n, s in zip(letters, given, strict=True)):
        text += "".join(f", {letter} = {size}" for letter, size in sizes.items())
        raise ValueError(f"{name} must have the shape {text}, got {given}")
    if finite and not value.is_meta and not bool(value.detach().isfinite().all()):
        raise ValueError(f"{name} must be finite, got NaN or infinity in it")
    return value


def check_state(z: Any, name: str, *, dim: int | None = None, tokens: bool = False) -> None:
    """``z`` must be a floating tensor (B, ..., dim), or (B, N, dim) where ``tokens``."""
    shape = "(B, N, d)" if tokens else "(B, ...)" if dim is None else "(B, ..., d)"
    if not isinstance(z, Tensor):
        raise TypeError(f"{name}: z must be a tensor {shape}, got {type(z).__name__}")
    if not z.is_floating_point():
        raise TypeError(f"{name}: z must be of a floating dtype, got {z.dtype}")
    least = 1 if dim is None else 2
    if (tokens and z.dim() != 3) or z.dim() < least:
        raise ValueError(f"{name}: z must have the shape {shape}, got {tuple(z.shape)}")
    if dim is not None and z.shape[-1] != dim:
        raise ValueError(f"{name}: z must have {dim} features (d), got shape {tuple(z.shape)}")


def check_mask(mask: Tensor | None, z: Tensor, name: str, *, features: int = 0) -> None:
    """``mask`` must be bool (B, N) for a state (B, N, ...) with ``features`` dimensions after N."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name}: mask must be a bool tensor (B, N), got {kind}")
    if z.dim() < 2 + features:
        raise ValueError(
            f"{name}: mask needs a state with tokens (B, N, ...), got z of shape {tuple(z.shape)}"
        )
    if mask.shape != z.shape[:2]:
        raise ValueError(
            f"{name}: mask must have the shape (B, N) = {tuple(z.shape[:2])}, "
            f"got {tuple(mask.shape)}"
        )
    if mask.device != z.device:
        raise ValueError(f"{name}: mask must be on {z.device} like z, got {mask.device}")


def check_tokens(
    z: Any,
    mask: Tensor | None,
    name: str,
    *,
    dim: int | None = None,
    tokens: bool = False,
    features: int = 1,
) -> None:
    """``z`` as :func:`check_state` and ``mask`` as :func:`check_mask` want them."""
    check_state(z, name, dim=dim, tokens=tokens)
    check_mask(mask, z, name, features=features)


def check_input(x: Any, z: Tensor, name: str) -> Tensor:
    """``x`` must be a tensor of the shape and device of ``z``."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name}: x must be a tensor like z, {tuple(z.shape)}, got {type(x).__name__}; "
            "where x is a dict or a tuple, choose its part with .select(key)"
        )
    if x.shape != z.shape:
        raise ValueError(
            f"{name}: x must have the shape of z, {tuple(z.shape)}, got {tuple(x.shape)}"
        )
    if x.device != z.device:
        raise ValueError(f"{name}: x must be on {z.device} like z, got {x.device}")
    return x


def check_dtype(x: Tensor, weight: Tensor, name: str) -> None:
    """``x`` must have the device and, but under autocast, the dtype of the weight that multiplies it."""
    if x.device != weight.device:
        raise ValueError(f"{name}: x must be on {weight.device} like the weights, got {x.device}")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{name}: x must have the dtype of the weights, {weight.dtype}, got {x.dtype}; convert "
            "one of them with .to()"
        )


def visible_input(
    x: Any, weight: Tensor, mask: Tensor | None, name: str, *, tokens: bool = False
) -> Tensor:
    """``x`` (B, ..., k), or (B, N, k) where ``tokens``, for a weight (rows, k); zero at masked tokens."""
    width = weight.shape[1]
    shape = f"(B, {'N' if tokens else '...'}, {width})"
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name}: x must hold tokens {shape}, got {type(x).__name__}; where x is a dict or a tuple, "
            "choose its part with .select(key)"
        )
    if x.dim() < 2 or (tokens and x.dim() != 3) or x.shape[-1] != width:
        raise ValueError(f"{name}: x must have the shape {shape}, got {tuple(x.shape)}")
    check_dtype(x, weight, name)
    check_mask(mask, x, f"{name}, x", features=1)
    return hide(x, mask)

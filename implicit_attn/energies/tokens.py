"""Sums over the entries of each sample, and masks over tokens."""

from __future__ import annotations

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

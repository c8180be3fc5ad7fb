"""Dtypes of what a solver keeps beside its states, and questions to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from solvers.core.device import readable


def small_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the small systems of a solver: float32 for half precision, else the state's."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def surely_all(mask: Tensor) -> bool:
    """Whether the host sees that every entry holds; False where it would have to wait for the answer.

    The code that it saves must also be right when every entry holds.
    """
    return readable(mask.device) and bool(mask.all())


def choose(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Rows of ``new`` (n, D) where ``mask`` (n, 1), else rows of ``old``; ``new`` where the host sees all."""
    return new if surely_all(mask) else torch.where(mask, new, old)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, 0 where the numerator is 0."""
    return torch.where(numerator == 0, numerator, numerator / denominator)


def true_rows(mask: Tensor) -> Tensor:
    """Indices of the True entries of a mask of n entries; waits for the device."""
    return torch.nonzero(mask.reshape(-1)).reshape(-1)

"""Decisions of the host about numbers of tensors.

On a CUDA device the host waits for the answer, about 11 microseconds on an H100, which is less than the
launches that it saves. In a transform of ``torch.func`` and while a CUDA graph is recorded, it sees none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from solvers.core.context import CONTEXT
from solvers.core.modes import in_transform


def readable() -> bool:
    """Whether the host can see the numbers of tensors."""
    return not (CONTEXT.recording or in_transform())


def maybe_any(mask: Tensor) -> bool:
    """Whether any entry holds; True where the host cannot see it.

    The code behind it must also be right when no entry holds.
    """
    return bool(mask.any()) if readable() else True


def small_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the small systems of a solver: float32 for half precision, else the state's."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def surely_all(mask: Tensor) -> bool:
    """Whether the host sees that every entry holds.

    The code that it saves must also be right when every entry holds.
    """
    return readable() and bool(mask.all())


def choose(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Rows of ``new`` (n, D) where ``mask`` (n, 1), else rows of ``old``; ``new`` where the host sees all."""
    return new if surely_all(mask) else torch.where(mask, new, old)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, 0 where the numerator is 0."""
    return torch.where(numerator == 0, numerator, numerator / denominator)


def true_rows(mask: Tensor) -> Tensor:
    """Indices of the True entries of a mask of n entries; waits for the device."""
    return torch.nonzero(mask.reshape(-1)).reshape(-1)

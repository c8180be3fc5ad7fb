"""The zero-sum gauge of couplings between discrete sites."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def zero_sum(couplings: Tensor) -> Tensor:
    """Couplings in the zero-sum gauge, both directions averaged, (N, N, d, d).

    Within each block ``J^ = J - mean_a J - mean_b J + mean_ab J``, then ``(J^_ij + J^_ji^T) / 2``. What
    is dropped depends on one of the two colours alone and only moves fields, so models that differ in
    it are the same. Blocks ``J_ii`` are set to 0.

    Args:
        couplings: J (N, N, d, d), floating.

    Raises:
        TypeError, ValueError: as :func:`check_couplings`.

    Source: Ekeberg et al. (2013), https://arxiv.org/abs/1211.1281.
    """
    check_couplings(couplings)
    centred = couplings - couplings.mean(2, keepdim=True)
    centred = centred - centred.mean(3, keepdim=True)
    both = 0.5 * (centred + centred.permute(1, 0, 3, 2))
    own = torch.eye(len(both), dtype=torch.bool, device=both.device)
    return both.masked_fill(own[..., None, None], 0.0)


def binary_size(couplings: Tensor) -> float:
    """The power of two next to the largest entry, 1 if all are 0: dividing by it rounds nothing.

    Squares of couplings far from 1 leave the range of float32, those of ``J / binary_size(J)`` do not.
    """
    largest = float(couplings.detach().abs().amax())
    return 2.0 ** (math.frexp(largest)[1] - 1) if largest > 0 else 1.0


def check_couplings(couplings: Tensor, name: str = "couplings") -> None:
    """Finite couplings (N, N, d, d).

    Raises:
        TypeError: no tensor, or not floating.
        ValueError: another shape; NaN or infinity in it.
    """
    if not isinstance(couplings, Tensor) or not couplings.is_floating_point():
        kind = couplings.dtype if isinstance(couplings, Tensor) else type(couplings).__name__
        raise TypeError(f"{name} must be a floating tensor (N, N, d, d), got {kind}")
    shape = tuple(couplings.shape)
    if len(shape) != 4 or shape[0] != shape[1] or shape[2] != shape[3] or 0 in shape:
        raise ValueError(f"{name} must have the shape (N, N, d, d), got {shape}")
    if not bool(couplings.isfinite().all()):
        raise ValueError(f"{name} must be finite, got NaN or infinity in it")

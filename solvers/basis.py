"""Products with the few vectors per sample that an accelerated method remembers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from solvers.solver import small_dtype

NUMPY_SIZE = 1 << 17


def inner_products(basis: Tensor, vector: Tensor) -> Tensor:
    """(B, m) products of the rows of basis (B, m, D) with vector (B, D), float32 or wider."""
    dtype = small_dtype(vector.dtype)
    if vector.dtype != dtype:
        basis, vector = basis.to(dtype), vector.to(dtype)
    if in_numpy(basis):
        product = np.matmul(basis.numpy(), vector.numpy()[:, :, None])
        return torch.from_numpy(product)[:, :, 0]
    return torch.bmm(vector.unsqueeze(1), basis.mT).squeeze(1)


def combine(start: Tensor, weights: Tensor, basis: Tensor) -> Tensor:
    """``start + sum_j weights_j basis_j``: (B, D), (B, m), (B, m, D) -> (B, D)."""
    weights = weights.to(start.dtype).unsqueeze(1)
    if in_numpy(basis) and in_numpy(start):
        return torch.from_numpy(np.matmul(weights.numpy(), basis.numpy()))[:, 0].add_(start)
    return torch.baddbmm(start.unsqueeze(1), weights, basis).squeeze(1)


def in_numpy(tensor: Tensor) -> bool:
    """Small batches on the CPU: NumPy's products start no threads, which cost more than the sums."""
    wide = tensor.dtype in (torch.float32, torch.float64)
    small = tensor.device.type == "cpu" and tensor.numel() <= NUMPY_SIZE
    return wide and small and not torch.is_grad_enabled()

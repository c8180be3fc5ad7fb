"""Products with the few vectors per sample that an accelerated method keeps.

Small batches on the CPU go through NumPy, whose calls cost a third of torch's and start no threads:
these calls are most of the cost of a step there.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from solvers.core.arrays import fits_numpy, small_dtype


def inner_products(basis: Tensor, vector: Tensor) -> Tensor:
    """(B, m) products of the rows of basis (B, m, D) with vector (B, D), float32 or wider."""
    dtype = small_dtype(vector.dtype)
    if vector.dtype != dtype:
        basis, vector = basis.to(dtype), vector.to(dtype)
    if fits_numpy(basis):
        product = np.matmul(basis.numpy(), vector.numpy()[:, :, None])
        return torch.from_numpy(product)[:, :, 0]
    return torch.bmm(vector.unsqueeze(1), basis.mT).squeeze(1)


def combine(start: Tensor, weights: Tensor, basis: Tensor, sign: int = 1) -> Tensor:
    """``start + sign sum_j weights_j basis_j``: (B, D), (B, m), (B, m, D) -> (B, D)."""
    weights = weights.to(start.dtype).unsqueeze(1)
    if fits_numpy(basis) and fits_numpy(start):
        total = np.matmul(weights.numpy(), basis.numpy())[:, 0]
        operation = np.add if sign > 0 else np.subtract
        return torch.from_numpy(operation(start.numpy(), total, out=total))
    return torch.baddbmm(start.unsqueeze(1), weights, basis, alpha=sign).squeeze(1)


def solve_small(matrices: Tensor, right: Tensor) -> Tensor:
    """(B, m) solutions of symmetric systems (B, m, m) that are regular by construction."""
    if matrices.shape[1] == 1:
        return right / matrices[:, 0]
    return torch.linalg.solve_ex(matrices, right.unsqueeze(2))[0].squeeze(2)


def write_symmetric(
    gram: Tensor, slot: int, row: Tensor, ridge: float = 1.0, tiny: float = 0.0
) -> Tensor:
    """Write row (B, k) into row and column ``slot`` of gram (B, m, m), its diagonal ``ridge d + tiny``.

    Returns gram, or a changed copy where autograd records (unrolled solves).
    """
    filled = row.shape[1]
    changes = ridge != 1.0 or tiny != 0.0
    if torch.is_grad_enabled():
        gram = gram.clone()
    if fits_numpy(gram) and not row.requires_grad:
        matrix, values = gram.numpy(), row.numpy()
        if changes:
            values[:, slot] = values[:, slot] * ridge + tiny
        matrix[:, slot, :filled] = values
        matrix[:, :filled, slot] = values
        return gram
    gram[:, slot, :filled] = row
    gram[:, :filled, slot] = row
    if changes:
        gram[:, slot, slot] = row[:, slot] * ridge + tiny
    return gram

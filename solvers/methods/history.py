"""Products with the few vectors per sample that an accelerated method keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from solvers.core.device import small_dtype


def inner_products(basis: Tensor, vector: Tensor) -> Tensor:
    """(B, m) products of the rows of basis (B, m, D) with vector (B, D), float32 or wider."""
    dtype = small_dtype(vector.dtype)
    if vector.dtype != dtype:
        basis, vector = basis.to(dtype), vector.to(dtype)
    return torch.bmm(vector.unsqueeze(1), basis.mT).squeeze(1)


def combine(start: Tensor, weights: Tensor, basis: Tensor, sign: int = 1) -> Tensor:
    """``start + sign sum_j weights_j basis_j``: (B, D), (B, m), (B, m, D) -> (B, D)."""
    weights = weights.to(start.dtype).unsqueeze(1)
    return torch.baddbmm(start.unsqueeze(1), weights, basis, alpha=sign).squeeze(1)


def solve_small(matrices: Tensor, right: Tensor) -> Tensor:
    """(B, m) solutions of symmetric systems (B, m, m) that are regular by construction."""
    if matrices.shape[1] == 1:
        return right / matrices[:, 0]
    return torch.linalg.solve_ex(matrices, right.unsqueeze(2))[0].squeeze(2)


def write_symmetric(gram: Tensor, slot: int, row: Tensor) -> Tensor:
    """Write row (B, k) into row and column ``slot`` of gram (B, m, m).

    Returns gram, or a changed copy where autograd records (unrolled solves).
    """
    filled = row.shape[1]
    if torch.is_grad_enabled():
        gram = gram.clone()
    gram[:, slot, :filled] = row
    gram[:, :filled, slot] = row
    return gram

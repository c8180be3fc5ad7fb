"""Sigmoid attention in dense tensor operations: the definition that the strips must match.

For the formulas see ``dispatch``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.kernels.arguments import wide_dtype, without_autocast, zero_masked


@without_autocast
def sigmoid_attention(
    z: Tensor, beta: float, *, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    dtype, z = z.dtype, zero_masked(z, mask).to(wide_dtype(z))
    gates = torch.sigmoid((z @ z.mT) * beta)
    gradient = zero_masked((gates - gates.square()) @ z, mask).to(dtype)
    if mask is not None:
        pairs = mask[:, None, :, None] & mask[:, None, None, :]
        gates = gates.masked_fill(~pairs, 0.0)
    return gradient, gates.flatten(2).sum(2) / (2.0 * beta)


@without_autocast
def sigmoid_attention_hvp(
    z: Tensor, v: Tensor, beta: float, *, mask: Tensor | None = None
) -> Tensor:
    dtype, wide = z.dtype, wide_dtype(z)
    z, v = zero_masked(z, mask).to(wide), zero_masked(v, mask).to(wide)
    gates = torch.sigmoid((z @ z.mT) * beta)
    slope = gates - gates.square()
    one_side = v @ z.mT
    bend = slope * (1.0 - 2.0 * gates) * ((one_side + one_side.mT) * beta)
    return zero_masked(slope @ v + bend @ z, mask).to(dtype)

"""Bi-softmax by strips where scores are bounded: half of the tiles serve both of their sides.

With ``e = exp(S)``, symmetric, ``l_i = sum_j e_ij`` and ``u = 1 / l``, the gradient's matrix is
``(P + P^T)_ij = e_ij (u_i + u_j)``. A strip holds some rows of ``e`` and the columns from its first
row on; it gives row sums and column sums, and products with either side. In units of N^2 p
multiply-adds the gradient takes 2 (0.5 for the sums, 1.5 for the products) and the Hessian-vector
product 5 (1.5 and 3.5). A strip that is a whole matrix is kept from the first pass to the second.

Tensors are (G, N, p), as in ``tiling``; ``unmasked`` (G, N, 1) is ``tiling.wide_mask``. No row maximum
is taken: the scores' bound must leave ``exp`` within the dtype (``S_ii >= 0``, so no row sum is below 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.kernels.tiling import SymmetricStrip, SymmetricStrips


def gradient(z: Tensor, beta: float, unmasked: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(P + P^T) Z`` (G, N, p) and ``L`` (G, N)."""
    output = torch.zeros_like(z)
    lse = z.new_empty(z.shape[:2])
    tiling = SymmetricStrips(z, beta, buffers=2)
    for heads in tiling.groups:
        part = None if unmasked is None else unmasked[heads]
        strips = tiling.of(heads)
        add_gradient = _whole_gradient if len(strips) == 1 else _gradient
        add_gradient(strips, z[heads], part, output[heads], lse[heads])
    return output if unmasked is None else output.mul_(unmasked), lse


def product(
    z: Tensor,
    v: Tensor,
    beta: float,
    unmasked: Tensor | None,
    lse: Tensor | None,
    cotangent: Tensor | None,
) -> Tensor:
    """Hessian times ``v``, plus ``beta (diag(a) P + P^T diag(a)) Z`` for a ``cotangent`` a (G, N)."""
    output = torch.zeros_like(z)
    tiling = SymmetricStrips(z, beta, buffers=3)
    for heads in tiling.groups:
        part, given, a = (None if t is None else t[heads] for t in (unmasked, lse, cotangent))
        _add_product(tiling.of(heads), z[heads], v[heads], beta, part, given, a, output[heads])
    return output if unmasked is None else output.mul_(unmasked)


def _reciprocals(total: Tensor, unmasked: Tensor | None) -> tuple[Tensor, Tensor]:
    """``u = 1 / l`` and ``L = log l``; zero at masked tokens."""
    if unmasked is None:
        return total.reciprocal(), total.log()
    masked = unmasked.squeeze(-1) == 0
    total = total.masked_fill(masked, 1.0)
    return total.reciprocal().masked_fill_(masked, 0.0), total.log()


def _gradient(
    strips: list[SymmetricStrip], z: Tensor, unmasked: Tensor | None, output: Tensor, lse: Tensor
) -> None:
    total = torch.zeros_like(lse)
    for strip in strips:
        strip.add_sums(strip.scores().exp_(), total, unmasked)
    reciprocal, logarithm = _reciprocals(total, unmasked)
    lse.copy_(logarithm)
    for strip in strips:
        exponentials = strip.scores().exp_()
        both = exponentials.mul_(strip.pair_sums(reciprocal, 1))
        strip.add_products(both, z, output)


def _whole_gradient(
    strips: list[SymmetricStrip], z: Tensor, unmasked: Tensor | None, output: Tensor, lse: Tensor
) -> None:
    """One strip is the matrix: it is computed once, and has no other side."""
    (strip,) = strips
    exponentials = strip.scores().exp_()
    total = exponentials.sum(-1) if unmasked is None else (exponentials @ unmasked).squeeze(-1)
    reciprocal, logarithm = _reciprocals(total, unmasked)
    lse.copy_(logarithm)
    torch.bmm(strip.pair_sums(reciprocal, 1).mul_(exponentials), z, out=output)


def _add_product(
    strips: list[SymmetricStrip],
    z: Tensor,
    v: Tensor,
    beta: float,
    unmasked: Tensor | None,
    lse: Tensor | None,
    cotangent: Tensor | None,
    output: Tensor,
) -> None:
    """``G V + M Z`` with ``G = e (u_i + u_j)``, ``M = G T - e (w_i + w_j)``, ``w = u (r - beta a)``."""
    total, mean = torch.zeros_like(z[:, :, 0]), torch.zeros_like(z[:, :, 0])
    exponentials = weighted = z
    for strip in strips:
        exponentials = strip.scores().exp_()
        if lse is None:
            strip.add_sums(exponentials, total, unmasked)
        weighted = strip.tangents(z, v).mul_(exponentials)
        strip.add_sums(weighted, mean, None)  # zero at masked tokens
    if lse is None:
        reciprocal, _ = _reciprocals(total, unmasked)
    else:
        reciprocal = lse.neg().exp_()
        reciprocal = reciprocal if unmasked is None else reciprocal.mul_(unmasked.squeeze(-1))
    weight = mean.mul_(reciprocal)  # r
    if cotangent is not None:
        weight = weight.sub_(cotangent, alpha=beta)
    weight.mul_(reciprocal)
    for strip in strips:
        if len(strips) > 1:
            exponentials = strip.scores().exp_()
            weighted = strip.tangents(z, v).mul_(exponentials)
        both = strip.pair_sums(reciprocal, 2)
        weighted.mul_(both)
        both.mul_(exponentials)
        weighted.addcmul_(exponentials, weight[:, strip.first : strip.end, None], value=-1.0)
        weighted.addcmul_(exponentials, weight[:, None, strip.first :], value=-1.0)
        strip.add_products(both, v, output)
        strip.add_products(weighted, z, output)

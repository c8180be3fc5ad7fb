"""Bi-softmax attention in dense tensor operations: the definition that the other backends must match.

For the formulas see ``dispatch``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.kernels.arguments import (
    exact_if_alone,
    wide_dtype,
    within_exponent,
    without_autocast,
    zero_masked,
)
from implicit_attn.kernels.operators import has_tangent, transformed
from implicit_attn.kernels.pairs import Pairs, softmax_over_pairs, token_pairs


@without_autocast
def bisoftmax(
    z: Tensor,
    beta: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
    pairs: Pairs | None = None,
) -> tuple[Tensor, Tensor]:
    if pairs is not None:
        z = zero_masked(z, mask).contiguous()
        weights, lse = _softmax_of_pairs(z, beta, mask, causal, pairs)
        weights = weights.to(z.dtype)
        return _only_visible(torch.matmul(weights + weights.mT, z), lse, mask)
    blocked = _blocked(z, mask, causal)
    z = zero_masked(z, mask).contiguous()
    if within_exponent(limit) and not causal:
        both, lse = _symmetric_softmax(z, beta, blocked, mask)
    else:
        weights, lse = _row_softmax(z, beta, blocked)
        both = weights + weights.mT
    return _only_visible(torch.matmul(both, z), lse, mask)


@without_autocast
def bisoftmax_hvp(
    z: Tensor,
    v: Tensor,
    beta: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    lse: Tensor | None = None,
    pairs: Pairs | None = None,
) -> Tensor:
    dtype, wide = z.dtype, wide_dtype(z)
    blocked = _blocked(z, mask, causal) if pairs is None else None
    # The tangents nearly cancel in T - r: half precision would keep little of the difference.
    z = zero_masked(z, mask).to(wide).contiguous()
    v = zero_masked(v, mask).to(wide).contiguous()
    # A given lse, a constant, has no part in a derivative by z.
    recorded = torch.is_grad_enabled() and z.requires_grad
    if pairs is not None:
        weights, _ = _softmax_of_pairs(z, beta, mask, causal, pairs)
    elif lse is None or recorded or transformed() or has_tangent(z):
        weights, _ = _row_softmax(z, beta, blocked)
    else:
        scores = _scores(z, beta, blocked)
        weights = (scores - lse.unsqueeze(-1)).exp()
    one_side = torch.matmul(v, z.mT)
    tangent = (one_side + one_side.mT) * beta
    mean = (weights * tangent).sum(-1, keepdim=True)
    tilted = weights * (tangent - mean)
    product = torch.matmul(weights + weights.mT, v) + torch.matmul(tilted + tilted.mT, z)
    return zero_masked(product, mask).to(dtype)


def _only_visible(gradient: Tensor, lse: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both are zero at masked tokens already; no cotangent there, which may be NaN, goes further."""
    if mask is None:
        return gradient, lse
    return zero_masked(gradient, mask), lse.masked_fill(~mask[:, None], 0.0)


def _blocked(z: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """(B or 1, 1, N, N) bool, True where ``m_ij = 0``; the diagonal stays open.

    A masked token is a zero row that attends to itself alone: its log-sum-exp is 0 and its part of
    the gradient is 0, so no row is ever empty and nothing needs repair afterwards.
    """
    if mask is None and not causal:
        return None
    tokens = z.shape[2]
    if mask is None:
        return torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=z.device).triu(1)
    open_pairs = mask[:, None, :, None] & mask[:, None, None, :]
    if causal:
        open_pairs = open_pairs.tril()
    return ~(open_pairs | torch.eye(tokens, dtype=torch.bool, device=z.device))


def _scores(z: Tensor, beta: float, blocked: Tensor | None) -> Tensor:
    """``S = beta Z Z^T``, minus infinity where blocked; float32 for half precision."""
    z = z.to(wide_dtype(z))
    batch, heads, tokens, width = z.shape
    rows = z.view(batch * heads, tokens, width)
    scores = torch.baddbmm(z.new_zeros(()), rows, rows.mT, beta=0.0, alpha=beta)
    scores = scores.view(batch, heads, tokens, tokens)
    return scores if blocked is None else scores.masked_fill(blocked, -torch.inf)


def _row_softmax(z: Tensor, beta: float, blocked: Tensor | None) -> tuple[Tensor, Tensor]:
    """``P`` (B, H, N, N) and ``L`` (B, H, N)."""
    scores = _scores(z, beta, blocked)
    log_weights = scores.log_softmax(-1)
    # L_i = S_ii - log P_ii: the diagonal is never blocked, so both are finite.
    lse = scores.diagonal(dim1=-2, dim2=-1) - log_weights.diagonal(dim1=-2, dim2=-1)
    return log_weights.exp().to(z.dtype), lse


def _softmax_of_pairs(
    z: Tensor, beta: float, mask: Tensor | None, causal: bool, pairs: Pairs
) -> tuple[Tensor, Tensor]:
    """``P``, float32 or wider, and ``L`` over the pairs that all of mask, order and ``pairs`` allow.

    Rows without any key are zero, those of masked tokens with them.
    """
    pairs = pairs.intersect(token_pairs(mask, causal, z.shape[2], z.device))
    weights, lse, _ = softmax_over_pairs(_scores(z, beta, None), pairs)
    return weights, lse


def _symmetric_softmax(
    z: Tensor, beta: float, blocked: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``P + P^T`` and ``L`` for bounded scores and a symmetric mask.

    With ``e = exp(S)``, symmetric, and ``l_i = sum_j e_ij``: ``(P + P^T)_ij`` is
    ``e_ij (1 / l_i + 1 / l_j)``.
    """
    scores = _scores(z, beta, blocked)
    some_alone = mask is not None or z.shape[2] == 1
    own = scores.diagonal(dim1=-2, dim2=-1).clone() if some_alone else None
    exponentials = scores.exp()
    del scores  # one matrix less while the others are made
    totals = exponentials.sum(-2)  # columns and rows sum to the same
    shares = totals.reciprocal()
    both = exponentials * (shares.unsqueeze(-1) + shares.unsqueeze(-2))
    lse = totals.log()
    return both.to(z.dtype), lse if own is None else exact_if_alone(lse, own, mask)

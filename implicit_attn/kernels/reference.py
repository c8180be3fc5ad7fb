"""Attention in dense tensor operations, the reference for the other backends.

*Softmax attention* of queries among keys: scores ``S = beta Q K^T + bias``, rows
``L_i = log sum_j exp S_ij`` over the allowed pairs, and weights ``P_ij = exp(S_ij - L_i)``.

*Bi-softmax* of tokens among themselves: for the formulas see ``dispatch``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicit_attn.kernels.arguments import (
    Pairs,
    token_pairs,
    wide_dtype,
    within_exponent,
    without_autocast,
    zero_masked,
)

# --- softmax attention ----------------------------------------------------------------------------


def softmax_over_pairs(
    scores: Tensor, pairs: Pairs | None, bounded: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return softmax and log-sum-exp of each row of ``scores + bias`` over the allowed pairs.

    Scores of excluded pairs are never used, even NaN. A row without any key has weights and log-sum-exp 0.

    Args:
        scores: (B, H, N, M), float32 or wider.
        bounded: whether ``exp`` of the scores is finite without subtracting row maxima; ignored with a
            bias.

    Returns:
        weights (B, H, N, M), lse (B, H, N), and which rows have a key, (B or 1, H or 1, N) bool, or
        None if all have one.
    """
    allowed, bias = pairs or Pairs()
    scores = scores if bias is None else scores + bias.to(scores.dtype)
    attends = None if allowed is None else allowed.any(-1)
    if allowed is not None and attends is not None:
        # A row without keys is zero here and removed below, which avoids NaN.
        closed = scores.new_zeros(()).masked_fill(attends, -torch.inf).unsqueeze(-1)
        scores = torch.where(allowed, scores, closed)
    if bounded and bias is None:
        exponentials = scores.exp()
        total = exponentials.sum(-1, keepdim=True)
        weights, lse = exponentials / total, total.log().squeeze(-1)
    else:
        weights, lse = scores.softmax(-1), scores.logsumexp(-1)
    if attends is None:
        return weights, lse, None
    weights = weights.masked_fill(~attends.unsqueeze(-1), 0.0)
    return weights, lse.masked_fill(~attends, 0.0), attends


class Attended(NamedTuple):
    """Weights P (B, H, N, M) or None, L (B, H, N), and which queries have a key."""

    weights: Any
    lse: Tensor
    attends: Tensor | None  # (B or 1, H or 1, N) bool; None: all

    def only(self, query: Tensor) -> Tensor:
        """Return ``query`` (B, H, N, p) with zeros at queries without a key."""
        there = self.attends
        return query if there is None else query.masked_fill(~there.unsqueeze(-1), 0.0)


@without_autocast
def attend(
    query: Tensor,
    key: Tensor,
    beta: float | Tensor,
    *,
    pairs: Pairs | None = None,
    limit: float | None = None,
) -> Attended:
    """Return the softmax of the queries over the keys.

    Args:
        query, key: (B, H, N, p) and (B, H, M, p), floating-point.
        beta: a number, or one per head, (H, 1, 1).
        pairs: allowed pairs and their biases; None for all pairs without bias.
        limit: bound on every ``|S_ij|`` without a bias; bounds up to 60 make row maxima unnecessary.
    """
    wide = wide_dtype(query)
    scores = (query.to(wide) @ key.to(wide).mT) * beta
    return Attended(*softmax_over_pairs(scores, pairs, within_exponent(limit)))


@without_autocast
def dense(
    query: Tensor, key: Tensor, beta: float, mask: Tensor | None, pairs: Pairs | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``P K`` in the dtype of the queries, and L, over the unmasked keys (B, M)."""
    if mask is not None:
        pairs = (pairs or Pairs()).intersect(mask[:, None, None])
    weights, lse, _ = attend(query, key, beta, pairs=pairs)
    return weights.to(query.dtype) @ key, lse


def covariance_product(
    weights: Tensor, values: Tensor, vector: Tensor, *, mean: Tensor | None = None
) -> Tensor:
    """Return ``C_i w_i = sum_j P_ij (v_j - m_i) ((v_j - m_i).w_i)`` with the mean ``m_i = sum_j P_ij v_j``.

    It multiplies the covariance under attention weights with a vector, without forming a p x p matrix. With
    the keys as values, ``C w / T`` is the derivative of the attention output
    ``sum_j softmax_j(q.k_j / T) k_j`` with respect to q along w.

    Args:
        weights: P (B, H, N, M), floating-point, whose rows sum to 1.
        values: v, (B, H, M, r).
        vector: w, (B, H, N, r).
        mean: means m (B, H, N, r) if known; None to compute them, which is more accurate for values
            with a large common offset.

    Returns:
        (B, H, N, r) in the dtype of ``vector``, computed in the widest dtype of the arguments,
        float32 or wider; differentiable any number of times.

    Raises:
        TypeError, ValueError: if an argument is invalid.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907, as the second-order term of a Newton step.
    """
    named = {"weights": weights, "values": values, "vector": vector}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {got}")
    if weights.dim() != 4:
        raise ValueError(f"weights must have the shape (B, H, N, M), got {tuple(weights.shape)}")
    *lead, queries, keys = weights.shape
    width = values.shape[-1:]
    for name, tokens in (("values", keys), ("vector", queries)):
        if named[name].shape != (*lead, tokens, *width):
            wanted, got = (*lead, tokens, *width), tuple(named[name].shape)
            raise ValueError(f"{name} must have the shape {wanted}, got {got}")
    if mean is not None and mean.shape != vector.shape:
        wanted, got = tuple(vector.shape), tuple(mean.shape)
        raise ValueError(f"mean must have the shape of vector, {wanted}, got {got}")
    return _covariance_product(values, weights, vector, mean)


@without_autocast
def _covariance_product(
    values: Tensor, weights: Tensor, vector: Tensor, mean: Tensor | None
) -> Tensor:
    wide = torch.promote_types(wide_dtype(vector), torch.promote_types(values.dtype, weights.dtype))
    values, weights, moved = (t.to(wide) for t in (values, weights, vector))
    # Subtracting a common offset of the values avoids cancellation of its squares.
    origin = values[:, :, :1]
    values = values - origin
    mean = weights @ values if mean is None else mean.to(wide) - origin
    along = moved @ values.mT - (moved * mean).sum(-1, keepdim=True)
    # sum_j P_ij (v_j - m_i).w_i = 0, so the second mean drops out.
    return ((weights * along) @ values).to(vector.dtype)


# --- bi-softmax -----------------------------------------------------------------------------------


@without_autocast
def bisoftmax(
    z: Tensor,
    beta: float,
    mask: Tensor | None = None,
    causal: bool = False,
    pairs: Pairs | None = None,
) -> tuple[Tensor, Tensor]:
    z = zero_masked(z, mask)
    weights, lse = _self_attention(z, beta, mask, causal, pairs)
    weights = weights.to(z.dtype)
    # Cotangents at masked tokens, which may be NaN, are discarded.
    return zero_masked((weights + weights.mT) @ z, mask), lse


@without_autocast
def bisoftmax_hvp(
    z: Tensor,
    v: Tensor,
    beta: float,
    mask: Tensor | None = None,
    causal: bool = False,
    pairs: Pairs | None = None,
) -> Tensor:
    dtype, wide = z.dtype, wide_dtype(z)
    # The tangents nearly cancel in T - r, so the difference is computed in float32.
    z, v = zero_masked(z, mask).to(wide), zero_masked(v, mask).to(wide)
    weights, _ = _self_attention(z, beta, mask, causal, pairs)
    one_side = v @ z.mT
    tangent = (one_side + one_side.mT) * beta
    mean = (weights * tangent).sum(-1, keepdim=True)
    tilted = weights * (tangent - mean)
    product = (weights + weights.mT) @ v + (tilted + tilted.mT) @ z
    return zero_masked(product, mask).to(dtype)


def _self_attention(
    z: Tensor, beta: float, mask: Tensor | None, causal: bool, pairs: Pairs | None
) -> tuple[Tensor, Tensor]:
    """Return ``P`` (B, H, N, N) and ``L`` (B, H, N), float32 or wider, zero at masked tokens."""
    wide = z.to(wide_dtype(z))
    order = token_pairs(mask, causal, z.shape[2], z.device)
    if order is not None:
        pairs = (pairs or Pairs()).intersect(order)
    weights, lse, _ = softmax_over_pairs(wide @ wide.mT * beta, pairs)
    return weights, lse

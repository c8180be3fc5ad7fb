"""Softmax attention of queries among keys: weights, free energy and forces, in dense operations or not.

With scores ``S = beta Q K^T + bias``, for the elastic form ``beta (Q K^T - |k_j|^2 / 2) + bias``, rows
``L_i = log sum_j exp S_ij`` over the allowed pairs and ``P_ij = exp(S_ij - L_i)`` the Helmholtz free energy
is ``F = -beta^-1 sum_i L_i``, plus ``1/2 |q_i|^2`` of each query that has a key in the elastic form, which
completes ``-beta^-1 log sum_j exp(-beta |q_i - k_j|^2 / 2 + bias_ij)``.

For keys that do not depend on the queries one stock attention with the keys for values gives value and
gradient (``flash``). Their derivatives, with them the Hessian-vector product, come by strips of rows: the
stock backward pass always differentiates by the keys too, which a Hessian-vector product does not need.
Only derivatives of derivatives hold an N x M matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicit_attn.kernels.arguments import wide_dtype, within_exponent, without_autocast
from implicit_attn.kernels.pairs import Pairs, softmax_over_pairs
from implicit_attn.kernels.tiling import row_strips

_stock = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Attended(NamedTuple):
    """Weights P (B, H, N, M) and L (B, H, N), float32 or wider, and which queries have a key."""

    weights: Tensor
    lse: Tensor
    attends: Tensor | None  # (B or 1, H or 1, N) bool; None: all

    def only(self, query: Tensor) -> Tensor:
        """``query`` (B, H, N, p) with zeros where there is no key."""
        there = self.attends
        return query if there is None else query.masked_fill(~there.unsqueeze(-1), 0.0)


@without_autocast
def attend(
    query: Tensor,
    key: Tensor,
    beta: float | Tensor,
    *,
    elastic: bool = False,
    pairs: Pairs | None = None,
    limit: float | None = None,
) -> Attended:
    """The softmax of the queries among the keys.

    Args:
        query, key: (B, H, N, p) and (B, H, M, p), floating.
        beta: a number, or one a head, (H, 1, 1).
        elastic: the scores are those of distances.
        pairs: which pairs there are, and their biases; None: all, without.
        limit: the caller's bound on every ``|S_ij|`` where there is no bias; up to 60 it saves the
            search for each row's maximum.
    """
    wide = wide_dtype(query)
    scores = (query.to(wide) @ key.to(wide).mT) * beta
    if elastic:
        scores = scores - (0.5 * beta) * key.to(wide).square().sum(-1).unsqueeze(-2)
    return Attended(*softmax_over_pairs(scores, pairs, within_exponent(limit)))


def forces(
    query: Tensor, key: Tensor, attended: Attended, *, elastic: bool = False
) -> tuple[Tensor, Tensor]:
    """``dF/dQ = -P K`` and ``dF/dK = -P^T Q``; elastic ``Q - P K`` and ``diag(1^T P) K - P^T Q``."""
    weights = attended.weights.to(query.dtype)
    by_query, by_key = -(weights @ key), -(weights.mT @ query)
    if elastic:
        by_query = by_query + attended.only(query)
        by_key = by_key + weights.sum(-2).unsqueeze(-1) * key
    return by_query, by_key


@without_autocast
def dense(
    query: Tensor, key: Tensor, beta: float, mask: Tensor | None, pairs: Pairs | None = None
) -> tuple[Tensor, Tensor]:
    """``P K`` in the dtype of the queries, and L, over the unmasked keys (B, M)."""
    if mask is not None:
        pairs = (pairs or Pairs()).intersect(mask[:, None, None])
    weights, lse, _ = attend(query, key, beta, pairs=pairs)
    return weights.to(query.dtype) @ key, lse


def flash(query: Tensor, key: Tensor, beta: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """By stock attention, which takes at least a query and a key, on the CPU."""
    mean, lse = _Queries.apply(query, (key,), beta, mask)  # type: ignore[misc]
    if not (torch.is_grad_enabled() and key.requires_grad):
        return mean, lse
    held = (query, mean.detach(), lse.detach())
    of_mean, of_lse = _Keys.apply(key, held, beta, mask)  # type: ignore[misc]
    return mean + of_mean, lse + of_lse


def _unit_stride(tensor: Tensor) -> Tensor:
    """With stride 1 along the width: the stock operator takes that for granted and asks no one."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Queries(torch.autograd.Function):
    """Stock attention with the keys for values, and its log-sum-exp; differentiable by the queries.

    The keys' derivative is a node of its own, ``_Keys``: a product with the Hessian, which asks for
    the queries' alone, then does not compute it.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: tuple[Tensor], beta: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        bias = None
        if mask is not None:
            bias = query.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
            bias = bias[:, None, None]
        (key,) = keys
        rows, columns = _unit_stride(query), _unit_stride(key)
        mean, lse = _stock(rows, columns, columns, 0.0, False, attn_mask=bias, scale=beta)
        ctx.beta = beta
        ctx.save_for_backward(query, key, mask, mean, lse)
        ctx.set_materialize_grads(False)
        return mean, lse

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        query, key, mask, mean, lse = ctx.saved_tensors
        pulled = _pull_back(query, key, mean, lse, cotangents, ctx.beta, mask, False)
        return pulled, None, None, None


class _Keys(torch.autograd.Function):
    """Zeros with the derivative by the keys of what ``_Queries`` returned."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, held: tuple[Tensor, ...], beta: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.beta = beta
        ctx.save_for_backward(key, mask, *held)
        ctx.set_materialize_grads(False)
        _, mean, lse = held
        return mean.new_zeros(()).expand(mean.shape), lse.new_zeros(()).expand(lse.shape)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        key, mask, query, mean, lse = ctx.saved_tensors
        pulled = _pull_back(query, key, mean, lse, cotangents, ctx.beta, mask, True)
        return pulled, None, None, None


@without_autocast
def _pull_back(
    query: Tensor,
    key: Tensor,
    mean: Tensor,
    lse: Tensor,
    cotangents: tuple[Tensor | None, ...],
    beta: float,
    mask: Tensor | None,
    by_key: bool,
) -> Tensor:
    """Pullback of cotangents g of the mean and a of the lse: to the queries, or to the keys.

    With ``dS = P * (G K^T - g_i.mean_i + a_i)``: ``beta dS K``, or ``beta dS^T Q + P^T G``. Where it
    will be differentiated again it comes from the graph of the dense formula, else by strips.
    """
    if torch.is_grad_enabled():
        pairs = zip(dense(query, key, beta, mask), cotangents, strict=True)
        outputs, weights = zip(*((t, g) for t, g in pairs if g is not None), strict=True)
        by = key if by_key else query
        return torch.autograd.grad(outputs, by, weights, create_graph=True)[0]
    wide = wide_dtype(query)
    given = zip((mean, lse), cotangents, strict=True)
    by_mean, by_lse = (torch.zeros_like(t) if g is None else g for t, g in given)
    rows, columns, pulled = (t.to(wide).flatten(0, 1) for t in (query, key, by_mean))
    shift = by_lse.to(wide) - (by_mean.to(wide) * mean.to(wide)).sum(-1)
    shift, lse = shift.flatten(0, 1).unsqueeze(-1), lse.flatten(0, 1).unsqueeze(-1)
    closed = None if mask is None else ~mask.repeat_interleave(query.shape[1], 0).unsqueeze(1)
    result = torch.zeros_like(columns if by_key else rows)
    for heads, strip in row_strips(columns, rows.shape[1]):
        part = heads, strip
        scores = torch.baddbmm(-lse[part], rows[part], columns[heads].mT, alpha=beta)
        if closed is not None:
            scores.masked_fill_(closed[heads], -torch.inf)
        weights = scores.exp_()
        by_scores = torch.baddbmm(shift[part], pulled[part], columns[heads].mT)
        by_scores.mul_(weights)
        if by_key:
            result[heads].baddbmm_(by_scores.mT, rows[part], alpha=beta)
            result[heads].baddbmm_(weights.mT, pulled[part])
        else:
            result[part] = torch.bmm(by_scores, columns[heads]).mul_(beta)
    like = key if by_key else query
    return result.view(like.shape).to(like.dtype)


def covariance_product(
    weights: Tensor, values: Tensor, vector: Tensor, *, mean: Tensor | None = None
) -> Tensor:
    """``C_i w_i = sum_j P_ij (v_j - m_i) ((v_j - m_i).w_i)`` with the mean ``m_i = sum_j P_ij v_j``.

    The product of a covariance under attention weights with a vector, which no p x p matrix needs. With
    the keys for values, ``C w / T`` is the derivative of the attention output
    ``sum_j softmax_j(q.k_j / T) k_j`` by q along w.

    Args:
        weights: P (B, H, N, M), floating, whose rows sum to 1.
        values: v, (B, H, M, r).
        vector: w, (B, H, N, r).
        mean: the means m (B, H, N, r) where they are known; None: they are computed, which is more
            precise where the values have a large common offset.

    Returns:
        (B, H, N, r) in the dtype of ``vector``, computed in the widest dtype of the arguments,
        float32 or wider; differentiable any number of times.

    Raises:
        TypeError, ValueError: for arguments other than the above, naming them.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907, where it is the second-order term of a Newton step.
    """
    named = {"weights": weights, "values": values, "vector": vector}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a tensor of a floating dtype, got {got}")
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
        raise ValueError(f"mean must be like vector, {wanted}, got {got}")
    return _covariance_product(values, weights, vector, mean)


@without_autocast
def _covariance_product(
    values: Tensor, weights: Tensor, vector: Tensor, mean: Tensor | None
) -> Tensor:
    wide = torch.promote_types(wide_dtype(vector), torch.promote_types(values.dtype, weights.dtype))
    values, weights, moved = (t.to(wide) for t in (values, weights, vector))
    # The covariance is that of the values without a common offset, whose squares would cancel.
    origin = values[:, :, :1]
    values = values - origin
    mean = weights @ values if mean is None else mean.to(wide) - origin
    along = moved @ values.mT - (moved * mean).sum(-1, keepdim=True)
    # sum_j P_ij (v_j - m_i).w_i = 0, so the second mean drops out.
    return ((weights * along) @ values).to(vector.dtype)

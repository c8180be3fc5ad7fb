"""Attention to frozen keys by one call of torch's fused attention, without an N x M matrix.

The keys are also the values. The mean of the keys is the gradient of the log-sum-exp, so the backward pass of
the fused call is the product with its Hessian.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.kernels import reference, strips
from implicit_attn.kernels.arguments import Pairs, token_pairs, wide_dtype, without_autocast

# Number of scores in memory at a time for the log-sum-exp where torch does not return it.
SCORES = 2**24
_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@without_autocast
def attend(
    query: Tensor,
    key: Tensor,
    beta: float,
    mask: Tensor | None,
    pairs: Pairs | None,
    causal: bool,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return ``sum_j P_ij k_j`` in the dtype of the queries, and L or None; see ``dispatch``."""
    allowed, bias = (pairs or Pairs()).intersect(None if mask is None else mask[:, None, None])
    if causal and not (allowed is None and bias is None):  # torch accepts either a mask or the flag
        order = token_pairs(None, True, query.shape[2], query.device)
        allowed, causal = Pairs(allowed).intersect(order).allowed, False
    attends = None
    if allowed is not None:
        attends = allowed.any(-1, keepdim=True)
        allowed = allowed | ~attends  # a softmax over no key would be NaN
    added = _added(query, allowed, bias)
    given = [t for t in (query, key, added) if t is not None]
    lse: Tensor | None = None
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        mean: Tensor = _Mean.apply(query, key, added, beta, causal)  # type: ignore[assignment]
    elif need_lse and query.device.type == "cpu":
        mean, lse = _mean_and_lse(query, key, added, beta, causal)
    else:
        mean = _mean(query, key, added, beta, causal)
    if need_lse and lse is None:
        lse = _log_sum_exp(query, key, added, beta, causal)
    if attends is not None:
        mean = mean.masked_fill(~attends, 0.0)
        lse = None if lse is None else lse.masked_fill(~attends.squeeze(-1), 0.0)
    return mean, lse


def _added(query: Tensor, allowed: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return what is added to the scores, in float32 or wider, or the allowed pairs if there is no bias."""
    if bias is None:
        return allowed
    bias = bias.to(wide_dtype(query))
    return bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)


def _mean(query: Tensor, key: Tensor, added: Tensor | None, beta: float, causal: bool) -> Tensor:
    if added is not None and added.is_floating_point():
        added = added.to(query.dtype)
    return F.scaled_dot_product_attention(
        query, key, key, attn_mask=added, is_causal=causal, scale=beta
    )


def _mean_and_lse(
    query: Tensor, key: Tensor, added: Tensor | None, beta: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Call the operator behind torch's attention on CPUs, which also returns the log-sum-exp."""
    if added is not None and added.dtype == torch.bool:
        added = query.new_zeros(added.shape).masked_fill_(~added, -torch.inf)
    added = None if added is None else added.to(query.dtype)
    # The operator requires unit strides along the width and does not check them.
    rows, columns = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key))
    return _ON_CPU(rows, columns, columns, 0.0, causal, attn_mask=added, scale=beta)


class _Mean(torch.autograd.Function):
    """Torch's attention with a differentiable backward pass, which then uses the dense formula."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, added: Tensor | None, beta: float, causal: bool
    ) -> Tensor:
        given = (query, key, added)
        ctx.save_for_backward(*given)
        ctx.beta, ctx.causal = beta, causal
        inputs: Any = [
            None if t is None else t.detach().requires_grad_(needed)
            for t, needed in zip(given, ctx.needs_input_grad, strict=False)
        ]
        with torch.enable_grad():
            ctx.inputs, ctx.mean = inputs, _mean(*inputs, beta=beta, causal=causal)
        return ctx.mean.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        again = torch.is_grad_enabled()
        if again:
            inputs = ctx.saved_tensors
            mean = _dense_mean(*inputs, beta=ctx.beta, causal=ctx.causal)
        else:
            inputs, mean = ctx.inputs, ctx.mean
        wanted = [t for t, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
        gradients = iter(
            torch.autograd.grad(mean, wanted, cotangents, retain_graph=True, create_graph=again)
        )
        return *(next(gradients) if needed else None for needed in ctx.needs_input_grad), None, None


def _dense_mean(
    query: Tensor, key: Tensor, added: Tensor | None, beta: float, causal: bool
) -> Tensor:
    pairs = Pairs(token_pairs(None, True, query.shape[2], query.device) if causal else None, added)
    if added is not None and added.dtype == torch.bool:
        pairs = Pairs(added)
    return reference.dense(query, key, beta, None, pairs)[0]


def _log_sum_exp(
    query: Tensor, key: Tensor, added: Tensor | None, beta: float, causal: bool
) -> Tensor:
    """Return L (B, H, N), float32 or wider, computed in strips of at most ``SCORES`` scores."""
    batch, heads, queries, _ = query.shape
    if added is not None:
        added = added.expand(-1, -1, queries, -1)
    rows = max(1, SCORES // max(1, batch * heads * key.shape[2]))
    arguments = (query, key, added, beta, causal)
    return torch.cat(strips.recomputed(_strip, queries, rows, *arguments), -1)


def _strip(
    rows: slice, query: Tensor, key: Tensor, added: Tensor | None, beta: float, causal: bool
) -> Tensor:
    wide = wide_dtype(query)
    scores = (query[:, :, rows].to(wide) @ key.to(wide).mT) * beta
    if causal:  # then nothing is added
        order = torch.arange(query.shape[2], device=query.device)
        scores = scores.masked_fill(order > order[rows, None], -torch.inf)
    elif added is not None and added.dtype == torch.bool:
        scores = scores.masked_fill(~added[:, :, rows], -torch.inf)
    elif added is not None:
        part = added[:, :, rows].to(wide)
        scores = (scores + part).masked_fill(part.isneginf(), -torch.inf)
    return scores.logsumexp(-1)

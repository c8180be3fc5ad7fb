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
from solvers.core.cuda import on_cuda

# Number of scores in memory at a time for the log-sum-exp where torch does not return it.
SCORES = 2**24


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
    if bias is None:
        added = allowed
    else:
        added = bias.to(wide_dtype(query))
        added = added if allowed is None else added.masked_fill(~allowed, -torch.inf)
    given = [t for t in (query, key, added) if t is not None]
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    attend: Any = _Attend.apply if recorded else _fused
    mean, lse = attend(query, key, added, beta, causal, need_lse)
    if attends is not None:
        mean = mean.masked_fill(~attends, 0.0)
        lse = None if lse is None else lse.masked_fill(~attends.squeeze(-1), 0.0)
    return mean, lse


def _fused(
    query: Tensor, key: Tensor, added: Tensor | None, beta: float, causal: bool, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the mean of the keys, and L without a gradient or None.

    ``added`` is added to the scores, or bool for the allowed pairs.
    """
    mask = added
    if mask is not None and mask.is_floating_point():
        mask = mask.to(query.dtype)
    learned = mask is not None and mask.requires_grad
    if learned or not need_lse or on_cuda(query):
        mean = F.scaled_dot_product_attention(
            query, key, key, attn_mask=mask, is_causal=causal, scale=beta
        )
        with torch.no_grad():
            lse = _log_sum_exp(query, key, added, beta, causal) if need_lse else None
        return mean, lse
    # The operator behind torch's attention on CPUs also returns L. It takes neither a bool mask nor one
    # that is differentiated, and requires unit strides along the width, which it does not check.
    if mask is not None and mask.dtype == torch.bool:
        mask = query.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    rows, columns = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key))
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mean, lse = operator(rows, columns, columns, 0.0, causal, attn_mask=mask, scale=beta)
    return mean, lse.detach()


class _Attend(torch.autograd.Function):
    """``_fused`` with a differentiable backward pass, which then uses the dense formula for the mean."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        given, (beta, causal, need_lse) = arguments[:3], arguments[3:]
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        ctx.options = beta, causal
        needed = ctx.needs_input_grad
        ctx.inputs = [_leaf(*each) for each in zip(given, needed, strict=False)]
        with torch.enable_grad():
            ctx.mean, lse = _fused(*ctx.inputs, beta=beta, causal=causal, need_lse=need_lse)
        return ctx.mean.detach(), lse

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(each is None for each in cotangents):
            return (None,) * len(ctx.needs_input_grad)
        again = torch.is_grad_enabled()
        inputs = ctx.saved_tensors if again else ctx.inputs
        wanted = [t for t, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
        outputs: list[Any] = [None, None]
        with torch.enable_grad():
            if cotangents[0] is not None:
                outputs[0] = _dense_mean(*inputs, *ctx.options) if again else ctx.mean
            if cotangents[1] is not None:
                outputs[1] = _log_sum_exp(*inputs, *ctx.options)
        pairs = [(t, g) for t, g in zip(outputs, cotangents, strict=True) if g is not None]
        values, weights = zip(*pairs, strict=True)
        graph = {"retain_graph": True, "create_graph": again}
        gradients = iter(torch.autograd.grad(values, wanted, weights, **graph))
        return tuple(next(gradients) if needed else None for needed in ctx.needs_input_grad)


def _leaf(tensor: Tensor | None, needed: bool) -> Any:
    return None if tensor is None else tensor.detach().requires_grad_(needed)


def _dense_mean(
    query: Tensor, key: Tensor, added: Tensor | None, beta: float, causal: bool
) -> Tensor:
    pairs = Pairs(token_pairs(None, True, query.shape[2], query.device) if causal else None, added)
    if added is not None and added.dtype == torch.bool:
        pairs = Pairs(added)
    return reference.dense(query, key, beta, None, pairs)[0]


@without_autocast
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

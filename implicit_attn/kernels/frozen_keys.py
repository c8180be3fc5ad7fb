"""Softmax attention of queries among keys that do not depend on them, through stock attention.

For the Helmholtz free energy ``-beta^-1 sum_i L_i`` with ``L_i = log sum_j exp(beta q_i.k_j)`` one
stock attention with the keys for values gives value and gradient. Their derivatives, with them the
Hessian-vector product, come by strips of rows: the stock backward pass always differentiates by the
keys too, which a Hessian-vector product does not need. Only derivatives of derivatives hold an N x M
matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_attn.kernels.arguments import (
    Choice,
    by_rescaling,
    check_beta,
    dense_for_transforms,
    rescaled,
    wide_dtype,
    without_autocast,
)
from implicit_attn.kernels.operators import refuse_forward_mode, transformed
from implicit_attn.kernels.pairs import Pairs, check_pairs, softmax_over_pairs
from implicit_attn.kernels.tiling import row_strips
from solvers.core.checks import require_choice

FROZEN_KEY_BACKENDS = ("auto", "reference", "flash")
# Fewer pairs of a query and a key in a head are left to the dense formula, measured on a CPU.
DENSE_PAIRS = 2**14

_stock = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def frozen_key_attention(
    query: Tensor,
    key: Tensor,
    beta: float | Tensor,
    *,
    mask: Tensor | None = None,
    pairs: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``sum_j P_ij k_j`` and ``L_i``, for ``P_ij = exp(beta q_i.k_j - L_i)`` over the unmasked keys.

    With a ``bias`` it is ``P_ij = exp(beta q_i.k_j + bias_ij - L_i)``.

    Args:
        query: (B, H, N, p), floating.
        key: (B, H, M, p), of the same dtype.
        beta: inverse temperature, > 0; a tensor of one element may be differentiated by.
        mask: (B, M) bool, False at masked keys; None: none is masked. Where all are masked both
            results are zero.
        pairs: bool (N, M), (B, N, M) or (B, H, N, M), True where query i may attend to key j. A query
            without any key has zeros.
        bias: floating, of such a shape, finite where the pair is allowed; may be differentiated by.
            Pairs and biases are taken by "reference" alone.
        backend: "reference" (dense), "flash" (stock attention, CPU only, memory O(N + M) for the
            results and their first derivatives), or "auto": see ``explain_frozen_keys``.

    Returns:
        (B, H, N, p) in the dtype of ``query``, and (B, H, N) in float32 or wider; differentiable any
        number of times.

    Raises:
        TypeError, ValueError: for a dtype, shape, ``beta`` or ``backend`` other than the above.
        NotImplementedError: forward-mode differentiation by "flash".
    """
    options: dict[str, Any] = {"mask": mask, "pairs": pairs, "bias": bias, "backend": backend}
    choice = explain_frozen_keys(query, key, beta, **options)
    varying = by_rescaling(beta)
    if varying is not None:
        scaled, key = rescaled(query, varying), key.to(wide_dtype(key))
        mean, lse = frozen_key_attention(scaled, key, 1.0, **options)
        return mean.to(query.dtype), lse
    beta = float(beta)
    if choice.backend == "reference":
        return _dense(query, key, beta, mask, check_pairs(pairs, bias, _pair_shape(query, key)))
    for tensor in (query, key):
        refuse_forward_mode(tensor, "flash", "the reverse mode of the result")
    mean, lse = _Queries.apply(query, (key,), beta, mask)  # type: ignore[misc]
    if not (torch.is_grad_enabled() and key.requires_grad):
        return mean, lse
    held = (query, mean.detach(), lse.detach())
    of_mean, of_lse = _Keys.apply(key, held, beta, mask)  # type: ignore[misc]
    return mean + of_mean, lse + of_lse


def explain_frozen_keys(
    query: Tensor,
    key: Tensor,
    beta: float | Tensor,
    *,
    mask: Tensor | None = None,
    pairs: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> Choice:
    """Which backend ``frozen_key_attention`` takes for these arguments, and why.

    It raises the same errors; nothing is computed.
    """
    _check(query, key, beta, mask)
    check_frozen_key_backend(backend)
    if pairs is not None or bias is not None:
        check_pairs(pairs, bias, _pair_shape(query, key))
        if backend == "flash":
            raise ValueError('pairs and bias need backend="auto" or "reference", got \'flash\'')
        return Choice("reference", "only the dense formula takes pairs and biases")
    if backend == "flash" and query.device.type != "cpu":
        raise ValueError(f'backend="flash" needs tensors on the CPU, got {query.device}')
    if query.numel() == 0 or key.numel() == 0:
        return Choice("reference", "empty: stock attention takes at least a query and a key")
    if backend != "auto":
        return Choice(backend, "asked for")
    if query.device.type != "cpu":
        return Choice("reference", "the stock operators used here are the CPU's")
    dense = dense_for_transforms(query, key)
    if dense is not None:
        return dense
    if transformed():
        return Choice("reference", "inside torch.func.vmap, which takes the dense formula apart")
    if torch.compiler.is_compiling():
        return Choice("reference", "a compiler takes the dense formula apart")
    count = query.shape[2] * key.shape[2]
    if count < DENSE_PAIRS:
        return Choice("reference", f"{count} pairs: the dense formula has the least overhead")
    return Choice("flash", f"{count} pairs: stock attention holds no N x M matrix")


def check_frozen_key_backend(backend: str) -> str:
    """``backend`` itself where it is one of ``FROZEN_KEY_BACKENDS``."""
    return require_choice("backend", backend, FROZEN_KEY_BACKENDS)


def _check(query: Tensor, key: Tensor, beta: float | Tensor, mask: Tensor | None) -> None:
    if not query.is_floating_point() or key.dtype != query.dtype:
        raise TypeError(
            f"query and key must be of one floating dtype, got {query.dtype} and {key.dtype}"
        )
    matrices = query.dim() == key.dim() == 4
    if not matrices or query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        raise ValueError(
            "query and key must have the shapes (B, H, N, p) and (B, H, M, p), got "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    check_beta(beta)
    expected = (key.shape[0], key.shape[2])
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != expected):
        raise ValueError(
            f"mask must be a bool tensor (B, M) = {expected}, got {mask.dtype} {tuple(mask.shape)}"
        )


def _pair_shape(query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
    return query.shape[0], query.shape[1], query.shape[2], key.shape[2]


@without_autocast
def _dense(
    query: Tensor, key: Tensor, beta: float, mask: Tensor | None, pairs: Pairs | None = None
) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(query)
    scores = (query.to(wide) @ key.to(wide).mT) * beta
    if pairs is not None:
        pairs = pairs.intersect(None if mask is None else mask[:, None, None])
        weights, lse, _ = softmax_over_pairs(scores, pairs)
    elif mask is None:
        weights, lse = scores.softmax(-1), scores.logsumexp(-1)
    else:
        # A row without keys stays open and is emptied below, which spares it the NaN.
        nothing = ~mask.any(-1)[:, None, None]
        scores = scores.masked_fill(~(mask[:, None, None] | nothing.unsqueeze(-1)), -torch.inf)
        weights = scores.softmax(-1).masked_fill(nothing.unsqueeze(-1), 0.0)
        lse = scores.logsumexp(-1).masked_fill(nothing, 0.0)
    return weights.to(query.dtype) @ key, lse


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
        pairs = zip(_dense(query, key, beta, mask), cotangents, strict=True)
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

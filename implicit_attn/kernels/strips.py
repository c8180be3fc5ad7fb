"""Attention without an N x N matrix, from standard operators on strips of rows, on any device.

A strip contains all columns of some rows, up to its last row if causal. Its row maxima and row sums are
therefore final, and one pass adds its contributions to its rows and columns directly: ``P Z`` in the strip's
rows and ``P^T Z_rows`` everywhere. In units of N^2 p multiply-adds the gradient of bi-softmax costs 3 and its
Hessian-vector product 7, or half as much if causal. Half precision is computed in float32. For the formulas
see ``dispatch``, for autograd and autocast ``ops``.

Internal tensors are (G, N, p), G = B H heads, float32 or float64, with zero rows at masked tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from implicit_attn.kernels.arguments import ORDINARY, traced, wide_dtype, zero_masked

# Elements of a strip for all its heads: 1 MiB of float32, which fits into the cache.
STRIP = 2**18
ROWS = 128  # largest number of rows of a strip


def recomputed(function: Callable[..., Any], count: int, rows: int, *arguments: Any) -> list[Any]:
    """Return ``function(strip, *arguments)`` for strips of so many rows, at least one.

    Several strips are recomputed for derivatives, so only one of them is in memory at a time. With
    ``torch.func`` transforms, forward mode and compilers all of them are.
    """
    strips = [slice(first, first + rows) for first in range(0, max(count, 1), max(rows, 1))]
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    ordinary = all(type(each) in ORDINARY for each in tensors)
    if len(strips) == 1 or not ordinary or traced(*tensors):
        return [function(strip, *arguments) for strip in strips]
    options: Any = {"use_reentrant": False, "preserve_rng_state": False}
    return [checkpoint(function, strip, *arguments, **options) for strip in strips]


# --- bi-softmax -----------------------------------------------------------------------------------


def bisoftmax_forward(
    z: Tensor, beta: float, mask: Tensor | None, causal: bool, limit: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return gradient (B, H, N, p) in the dtype of ``z`` and lse (B, H, N) in float32 or wider."""
    tokens = _wide_rows(z, mask)
    gradient, lse = torch.zeros_like(tokens), tokens.new_empty(tokens.shape[:2])
    for strip in _strips(tokens, beta, mask, causal):
        lse[strip.heads, strip.rows] = strip.lse
        strip.add(gradient, strip.weights, tokens)
    return zero_masked(gradient.view(z.shape), mask).to(z.dtype), lse.view(z.shape[:3])


def bisoftmax_hvp(
    z: Tensor,
    v: Tensor,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    limit: float | None = None,
    lse: Tensor | None = None,
    lse_cotangent: Tensor | None = None,
) -> Tensor:
    """Return the Hessian times ``v`` plus the pullback of a cotangent a (B, H, N) of the lse.

    It is ``H V + beta (diag(a) P + P^T diag(a)) Z``, (B, H, N, p) in the dtype of ``z``. ``lse``, which other
    backends use, is computed again.
    """
    tokens, vectors = _wide_rows(z, mask), _wide_rows(v, mask)
    a, product = _cotangent(lse_cotangent, tokens, mask), torch.zeros_like(tokens)
    for strip in _strips(tokens, beta, mask, causal):
        tangent = strip.tangent(vectors, tokens, beta)
        mean = (strip.weights * tangent).sum(-1, keepdim=True)
        if a is not None:
            mean = mean.sub_(a[strip.heads, strip.rows], alpha=beta)
        tilted = tangent.sub_(mean).mul_(strip.weights)
        strip.add(product, strip.weights, vectors)
        strip.add(product, tilted, tokens)
    return zero_masked(product.view(z.shape), mask).to(z.dtype)


def hvp_pullback(
    z: Tensor,
    v: Tensor,
    direction: Tensor,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    lse_cotangent: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pullback of ``direction`` through ``bisoftmax_hvp`` to z, v (B, H, N, p), a (B, H, N).

    For a direction c the pullback of ``H V + J_L^T a`` (``J_L`` the Jacobian of the lse, a its cotangent)
    is the gradient of the scalar ``c.(H V) + a.(J_L c)`` in (z, v, a). With ``T^v = beta (V Z^T + Z V^T)``,
    ``r^v = rowsum(P * T^v)``, and the same for c, that scalar is the sum over i of

        ``sum_j P_ij Q_ij - r^v_i r^c_i / beta + a_i r^c_i``
        with ``Q_ij = T^v_ij T^c_ij / beta + v_i.c_j + c_i.v_j``

    and its derivatives, from which those in z, v and a follow by the product rule, are

        in S: ``P * (F - rowsum(P * F))``,   ``F = Q + (a - r^v / beta) T^c - (r^c / beta) T^v``
        in ``T^v``: ``P * (T^c - r^c) / beta``,   in ``T^c``: ``P * ((T^v - r^v) / beta + a)``.
    """
    tokens, vectors, along = (_wide_rows(t, mask) for t in (z, v, direction))
    by_z, by_v, by_a = (torch.zeros_like(t) for t in (tokens, vectors, tokens[..., :1]))
    cotangent = _cotangent(lse_cotangent, tokens, mask)
    for strip in _strips(tokens, beta, mask, causal):
        part, weights = (strip.heads, strip.rows), strip.weights
        a = 0.0 if cotangent is None else cotangent[part]
        tangent_v = strip.tangent(vectors, tokens, beta)
        tangent_c = strip.tangent(along, tokens, beta)
        mean_v = (weights * tangent_v).sum(-1, keepdim=True)
        mean_c = (weights * tangent_c).sum(-1, keepdim=True)
        by_a[part] = mean_c
        inner = strip.tangent(vectors, along).addcmul_(tangent_v, tangent_c, value=1.0 / beta)
        inner.add_((a - mean_v / beta) * tangent_c).addcmul_(mean_c, tangent_v, value=-1.0 / beta)
        by_scores = weights * inner.sub_((weights * inner).sum(-1, keepdim=True))
        by_tangent_c = weights * (tangent_v.sub_(mean_v) / beta + a)
        by_tangent_v = weights * tangent_c.sub_(mean_c) / beta
        for matrix, side in ((by_scores, tokens), (by_tangent_v, vectors), (by_tangent_c, along)):
            strip.add(by_z, matrix, side, beta)
        strip.add(by_v, by_tangent_v, tokens, beta)
        strip.add(by_v, weights, along)
    found = [zero_masked(t.view(*z.shape[:3], -1), mask) for t in (by_z, by_v, by_a)]
    return found[0].to(z.dtype), found[1].to(v.dtype), found[2].squeeze(-1)


class _Strip(NamedTuple):
    """Some rows of the matrices of some heads."""

    heads: slice
    rows: slice
    columns: slice
    weights: Tensor  # P (heads, rows, columns)
    lse: Tensor  # L (heads, rows)

    def tangent(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        """Return ``scale (left_i.right_j + right_i.left_j)`` for the rows i and columns j."""
        left, right = left[self.heads], right[self.heads]
        product = torch.bmm(left[:, self.rows], right[:, self.columns].mT)
        return product.baddbmm_(right[:, self.rows], left[:, self.columns].mT).mul_(scale)

    def add(self, output: Tensor, matrix: Tensor, side: Tensor, scale: float = 1.0) -> None:
        """Add ``scale (M side)`` to the rows of ``output`` and ``scale (M^T side)`` to its columns."""
        output, side = output[self.heads], side[self.heads]
        output[:, self.rows].baddbmm_(matrix, side[:, self.columns], alpha=scale)
        output[:, self.columns].baddbmm_(matrix.mT, side[:, self.rows], alpha=scale)


def _strips(z: Tensor, beta: float, mask: Tensor | None, causal: bool) -> Iterator[_Strip]:
    """Yield strips that cover all matrices ``beta Z Z^T``."""
    batch, tokens, _ = z.shape
    rows = min(tokens, ROWS)
    # On a CPU every core gets a head.
    least = torch.get_num_threads() if z.device.type == "cpu" else 1
    group = max(least, STRIP // (rows * tokens))
    order = torch.arange(tokens, device=z.device)
    kept = None if mask is None else mask.repeat_interleave(batch // len(mask), 0)
    for head in range(0, batch, group):
        heads = slice(head, head + group)
        for first in range(0, tokens, rows):
            own = slice(first, min(first + rows, tokens))
            columns = slice(0, own.stop if causal else tokens)
            left, right = z[heads, own], z[heads, columns]
            scores = torch.baddbmm(z.new_zeros(()), left, right.mT, beta=0.0, alpha=beta)
            row, column = order[own, None], order[columns]
            if causal:
                scores.masked_fill_(column > row, -torch.inf)
            if kept is not None:
                # A masked token attends only to itself. It is a zero row, so L_i = 0.
                both = kept[heads, own, None] & kept[heads, None, columns]
                scores.masked_fill_(~both & (column != row), -torch.inf)
            largest = scores.amax(-1, keepdim=True)
            weights = scores.sub_(largest).exp_()
            total = weights.sum(-1, keepdim=True)
            lse = largest.add_(total.log()).squeeze(-1)
            yield _Strip(heads, own, columns, weights.div_(total), lse)


def _wide_rows(z: Tensor, mask: Tensor | None) -> Tensor:
    """Convert (B, H, N, p) to contiguous (B H, N, p), float32 or wider, zero at masked tokens."""
    return zero_masked(z, mask).to(wide_dtype(z)).contiguous().flatten(0, 1)


def _cotangent(a: Tensor | None, like: Tensor, mask: Tensor | None) -> Tensor | None:
    """Convert numbers per row (B, H, N) to (B H, N, 1), zero at masked tokens."""
    return None if a is None else zero_masked(a.unsqueeze(-1), mask).flatten(0, 1).to(like)

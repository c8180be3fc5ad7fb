"""Bi-softmax by blocks of whole rows: any scores, any of the masks, one sweep.

A strip holds all columns of some rows (up to its last row where causal), so its row maxima and row
sums are final, and what it gives to its rows and to its columns is added at once: with W the strip's
``P``, the gradient is ``W Z`` in the strip's rows plus ``W^T Z_rows`` everywhere. In units of N^2 p
multiply-adds the gradient takes 3 and the Hessian-vector product 7, half of it where causal.

Tensors are (G, N, p), G = B H, float32 or float64, rows of tokens that do not count are zero.
``counts`` (G, N, 1) is 1 where a token counts and 0 elsewhere, or None.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from implicit_attn.kernels.bi_softmax.strips.symmetric import strip_heads, strip_rows


def gradient(z: Tensor, beta: float, counts: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """``(P + P^T) Z`` (G, N, p) and ``L`` (G, N)."""
    output = torch.zeros_like(z)
    lse = z.new_empty(z.shape[:2])
    for heads, first, end in strips(z, causal):
        part, stop = z[heads], end if causal else z.shape[1]
        rows = part[:, first:end]
        blocked = blocked_pairs(z, counts, causal, heads, first, end)
        weights, strip_lse = row_weights(part, beta, blocked, first, end, stop, None)
        lse[heads, first:end] = strip_lse
        output[heads, first:end].baddbmm_(weights, part[:, :stop])
        output[heads, :stop].baddbmm_(weights.mT, rows)
    return _hidden(output, lse, counts)


def product(
    z: Tensor,
    v: Tensor,
    beta: float,
    counts: Tensor | None,
    causal: bool,
    lse: Tensor | None,
    cotangent: Tensor | None,
) -> Tensor:
    """Hessian times ``v``, plus ``beta (diag(a) P + P^T diag(a)) Z`` for a ``cotangent`` a (G, N)."""
    output = torch.zeros_like(z)
    left, right = torch.cat((v, z), -1), torch.cat((z, v), -1)
    for heads, first, end in strips(z, causal):
        stop = end if causal else z.shape[1]
        blocked = blocked_pairs(z, counts, causal, heads, first, end)
        given = None if lse is None else lse[heads, first:end]
        weights, _ = row_weights(z[heads], beta, blocked, first, end, stop, given)
        tangent = torch.bmm(left[heads, first:end], right[heads, :stop].mT).mul_(beta)
        mean = torch.einsum("gij,gij->gi", weights, tangent)
        if cotangent is not None:
            mean = mean.sub_(cotangent[heads, first:end], alpha=beta)
        tilted = tangent.sub_(mean.unsqueeze(-1)).mul_(weights)
        for matrix, side in ((weights, v[heads]), (tilted, z[heads])):
            output[heads, first:end].baddbmm_(matrix, side[:, :stop])
            output[heads, :stop].baddbmm_(matrix.mT, side[:, first:end])
    return output if counts is None else output.mul_(counts)


def strips(z: Tensor, causal: bool) -> Iterator[tuple[slice, int, int]]:
    """Heads that share a strip, its first row, and the row after its last."""
    batch, tokens, _ = z.shape
    rows = strip_rows(tokens)
    group = strip_heads(z, rows)
    for head in range(0, batch, group):
        for first in range(0, tokens, rows):
            yield slice(head, min(head + group, batch)), first, min(first + rows, tokens)


def blocked_pairs(
    z: Tensor, counts: Tensor | None, causal: bool, heads: slice, first: int, end: int
) -> Tensor | None:
    """(G or 1, rows, columns) bool, True where ``m_ij = 0``; the diagonal stays open."""
    if counts is None and not causal:
        return None
    columns = torch.arange(end if causal else z.shape[1], device=z.device)
    rows = torch.arange(first, end, device=z.device).unsqueeze(-1)
    blocked = (columns > rows if causal else torch.zeros_like(columns > rows)).unsqueeze(0)
    if counts is not None:
        counting = counts[heads].squeeze(-1).bool()
        open_pairs = counting[:, first:end, None] & counting[:, None, : len(columns)]
        blocked = (blocked | ~open_pairs) & (columns != rows)
    return blocked


def row_weights(
    z: Tensor,
    beta: float,
    blocked: Tensor | None,
    first: int,
    end: int,
    stop: int,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``P`` of a strip and its ``L``, which is found unless given."""
    rows, columns = z[:, first:end], z[:, :stop]
    scores = torch.baddbmm(z.new_zeros(()), rows, columns.mT, beta=0.0, alpha=beta)
    if blocked is not None:
        scores.masked_fill_(blocked, -torch.inf)
    if lse is not None:
        return scores.sub_(lse.unsqueeze(-1)).exp_(), lse
    largest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    return weights.div_(total), largest.add_(total.log()).squeeze(-1)


def _hidden(output: Tensor, lse: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    if counts is None:
        return output, lse
    return output.mul_(counts), lse.mul_(counts.squeeze(-1))

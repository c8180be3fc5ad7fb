"""Bi-softmax by strips of whole rows: any scores, any of the masks, one sweep.

A strip holds all columns of some rows (up to its last row where causal), so its row maxima and row
sums are final, and what it gives to its rows and to its columns is added at once: with W the strip's
``P``, the gradient is ``W Z`` in the strip's rows plus ``W^T Z_rows`` everywhere. In units of N^2 p
multiply-adds the gradient takes 3 and the Hessian-vector product 7, half of it where causal.

Tensors are (G, N, p), as in ``tiling``; ``unmasked`` (G, N, 1) is ``tiling.wide_mask``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from implicit_attn.kernels.tiling import row_strips


def gradient(
    z: Tensor, beta: float, unmasked: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """``(P + P^T) Z`` (G, N, p) and ``L`` (G, N)."""
    output = torch.zeros_like(z)
    lse = z.new_empty(z.shape[:2])
    for heads, rows, columns, weights, strip_lse in softmax_strips(z, beta, unmasked, causal):
        lse[heads, rows] = strip_lse
        add_both_sides(output[heads], weights, z[heads], rows, columns)
    if unmasked is None:
        return output, lse
    return output.mul_(unmasked), lse.mul_(unmasked.squeeze(-1))


def product(
    z: Tensor,
    v: Tensor,
    beta: float,
    unmasked: Tensor | None,
    causal: bool,
    lse: Tensor | None,
    cotangent: Tensor | None,
) -> Tensor:
    """Hessian times ``v``, plus ``beta (diag(a) P + P^T diag(a)) Z`` for a ``cotangent`` a (G, N)."""
    output = torch.zeros_like(z)
    left, right = torch.cat((v, z), -1), torch.cat((z, v), -1)
    for heads, rows, columns, weights, _ in softmax_strips(z, beta, unmasked, causal, lse):
        tangent = torch.bmm(left[heads, rows], right[heads, columns].mT).mul_(beta)
        mean = torch.einsum("gij,gij->gi", weights, tangent)
        if cotangent is not None:
            mean = mean.sub_(cotangent[heads, rows], alpha=beta)
        tilted = tangent.sub_(mean.unsqueeze(-1)).mul_(weights)
        for matrix, side in ((weights, v[heads]), (tilted, z[heads])):
            add_both_sides(output[heads], matrix, side, rows, columns)
    return output if unmasked is None else output.mul_(unmasked)


def softmax_strips(
    z: Tensor, beta: float, unmasked: Tensor | None, causal: bool, lse: Tensor | None = None
) -> Iterator[tuple[slice, slice, slice, Tensor, Tensor]]:
    """Heads, rows and columns of each strip, its ``P`` and its ``L``, found unless ``lse`` has it."""
    for heads, rows in row_strips(z, z.shape[1]):
        columns = slice(0, rows.stop if causal else z.shape[1])
        left, right = z[heads, rows], z[heads, columns]
        scores = torch.baddbmm(z.new_zeros(()), left, right.mT, beta=0.0, alpha=beta)
        part = None if unmasked is None else unmasked[heads].squeeze(-1).bool()
        blocked = _blocked(z, part, causal, rows, columns)
        if blocked is not None:
            scores.masked_fill_(blocked, -torch.inf)
        if lse is not None:
            given = lse[heads, rows]
            yield heads, rows, columns, scores.sub_(given.unsqueeze(-1)).exp_(), given
            continue
        largest = scores.amax(-1, keepdim=True)
        weights = scores.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        yield heads, rows, columns, weights.div_(total), largest.add_(total.log()).squeeze(-1)


def add_both_sides(
    output: Tensor, matrix: Tensor, side: Tensor, rows: slice, columns: slice, scale: float = 1.0
) -> None:
    """Add ``scale (M side)`` to the strip's rows and ``scale (M^T side)`` to its columns."""
    output[:, rows].baddbmm_(matrix, side[:, columns], alpha=scale)
    output[:, columns].baddbmm_(matrix.mT, side[:, rows], alpha=scale)


def _blocked(
    z: Tensor, unmasked: Tensor | None, causal: bool, rows: slice, columns: slice
) -> Tensor | None:
    """(G or 1, rows, columns) bool, True where ``m_ij = 0``; the diagonal stays open."""
    if unmasked is None and not causal:
        return None
    row = torch.arange(rows.start, rows.stop, device=z.device).unsqueeze(-1)
    column = torch.arange(columns.stop, device=z.device)
    blocked = (column > row if causal else torch.zeros_like(column > row)).unsqueeze(0)
    if unmasked is not None:
        open_pairs = unmasked[:, rows, None] & unmasked[:, None, columns]
        blocked = (blocked | ~open_pairs) & (column != row)
    return blocked

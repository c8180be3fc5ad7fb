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


def pullback(
    z: Tensor,
    v: Tensor,
    c: Tensor,
    beta: float,
    unmasked: Tensor | None,
    causal: bool,
    cotangent: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by z, v (G, N, p) and a (G, N) of the scalar that a Hessian-vector product pulls back.

    For a direction c the pullback of ``H V + J_L^T a`` (``J_L`` the Jacobian of the lse, a its cotangent)
    is the gradient by (z, v, a) of the scalar ``c.(H V) + a.(J_L c)``. With ``T^v = beta (V Z^T + Z V^T)``,
    ``r^v = rowsum(P * T^v)``, and the same for c, that scalar is the sum over i of

        ``sum_j P_ij Q_ij - r^v_i r^c_i / beta + a_i r^c_i``
        with ``Q_ij = T^v_ij T^c_ij / beta + v_i.c_j + c_i.v_j``

    and its derivatives, from which those by z, v and a follow by the product rule, are

        by S: ``P * (F - rowsum(P * F))``,   ``F = Q + (a - r^v / beta) T^c - (r^c / beta) T^v``
        by ``T^v``: ``P * (T^c - r^c) / beta``,   by ``T^c``: ``P * ((T^v - r^v) / beta + a)``.
    """
    by_z, by_v, by_a = torch.zeros_like(z), torch.zeros_like(v), torch.empty_like(z[:, :, 0])
    for heads, rows, columns, weights, _ in softmax_strips(z, beta, unmasked, causal):
        own, vectors, along = z[heads], v[heads], c[heads]
        a = 0.0 if cotangent is None else cotangent[heads, rows, None]
        crossed = _both_sides(vectors, along, rows, columns)
        tangent_v = _both_sides(vectors, own, rows, columns).mul_(beta)
        tangent_c = _both_sides(along, own, rows, columns).mul_(beta)
        mean_v = (weights * tangent_v).sum(-1, keepdim=True)
        mean_c = (weights * tangent_c).sum(-1, keepdim=True)
        by_a[heads, rows] = mean_c.squeeze(-1)
        force = crossed.addcmul_(tangent_v, tangent_c, value=1.0 / beta)
        force.add_((a - mean_v / beta) * tangent_c).addcmul_(mean_c, tangent_v, value=-1.0 / beta)
        by_scores = weights * force.sub_((weights * force).sum(-1, keepdim=True))
        by_tangent_c = weights * (tangent_v.sub_(mean_v) / beta + a)
        by_tangent_v = weights * tangent_c.sub_(mean_c) / beta
        out_z, out_v = by_z[heads], by_v[heads]
        for matrix, side in ((by_scores, own), (by_tangent_v, vectors), (by_tangent_c, along)):
            add_both_sides(out_z, matrix, side, rows, columns, beta)
        add_both_sides(out_v, by_tangent_v, own, rows, columns, beta)
        add_both_sides(out_v, weights, along, rows, columns)
    return by_z, by_v, by_a


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


def _both_sides(left: Tensor, right: Tensor, rows: slice, columns: slice) -> Tensor:
    """``left_i.right_j + right_i.left_j`` of a strip."""
    product = torch.bmm(left[:, rows], right[:, columns].mT)
    return product.baddbmm_(right[:, rows], left[:, columns].mT)

"""Bi-softmax without an N x N matrix, from stock operators, on any device.

Two ways, both by strips of rows in a workspace of fixed size. Half precision is computed in float32.
For the formulas see ``dispatch``; for autograd and autocast ``ops``.

*Symmetric*, where scores are bounded: with ``e = exp(S)``, symmetric, ``l_i = sum_j e_ij`` and ``u = 1 / l``
the gradient's matrix is ``(P + P^T)_ij = e_ij (u_i + u_j)``. A strip holds some rows of ``e`` and the columns
from its first row on; it gives row sums and column sums, and products with either side. In units of N^2 p
multiply-adds the gradient takes 2 (0.5 for the sums, 1.5 for the products) and the Hessian-vector product
5 (1.5 and 3.5). A strip that is a whole matrix is kept from the first pass to the second. No row maximum
is taken: the scores' bound leaves ``exp`` within the dtype (``S_ii >= 0``, so no row sum is below 1).

*Rows*, for any scores and masks, in one sweep: a strip holds all columns of some rows (up to its last
row where causal), so its row maxima and row sums are final, and what it gives to its rows and to its
columns is added at once: ``P Z`` in the strip's rows plus ``P^T Z_rows`` everywhere. The gradient takes 3
and the Hessian-vector product 7, half of it where causal.

Tensors below are (G, N, p), as in ``tiling``; ``unmasked`` (G, N, 1) is ``tiling.wide_mask``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from implicit_attn.kernels.arguments import exact_if_alone, within_exponent
from implicit_attn.kernels.tiling import (
    SymmetricStrip,
    SymmetricStrips,
    row_strips,
    wide_mask,
    wide_rows,
)


def bisoftmax_forward(
    z: Tensor, beta: float, mask: Tensor | None, causal: bool, limit: float | None
) -> tuple[Tensor, Tensor]:
    """Gradient (B, H, N, p) in the dtype of ``z`` and lse (B, H, N) in float32 or wider."""
    tokens, unmasked = wide_rows(z, mask), wide_mask(z, mask)
    if _bounded(tokens, beta, causal, limit):
        gradient, lse = _symmetric_gradient(tokens, beta, unmasked)
        lse = lse.view(z.shape[:3])
        if mask is not None or z.shape[2] == 1:
            own = beta * tokens.square().sum(-1)
            lse = exact_if_alone(lse, own.view_as(lse), mask)
    else:
        gradient, lse = _row_gradient(tokens, beta, unmasked, causal)
    return gradient.view(z.shape).to(z.dtype), lse.view(z.shape[:3])


def bisoftmax_hvp(
    z: Tensor,
    v: Tensor,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    limit: float | None,
    lse: Tensor | None = None,
    lse_cotangent: Tensor | None = None,
) -> Tensor:
    """Hessian times ``v``, and the pullback of a cotangent a (B, H, N) of the lse.

    ``H V + beta (diag(a) P + P^T diag(a)) Z``, (B, H, N, p) in the dtype of ``z``.
    """
    tokens, vectors, unmasked = wide_rows(z, mask), wide_rows(v, mask), wide_mask(z, mask)
    given = (lse, _zero_masked_rows(lse_cotangent, mask))
    flat = [None if t is None else t.flatten(0, 1).to(tokens) for t in given]
    if _bounded(tokens, beta, causal, limit):
        result = _symmetric_product(tokens, vectors, beta, unmasked, *flat)
    else:
        result = _row_product(tokens, vectors, beta, unmasked, causal, *flat)
    return result.view(z.shape).to(z.dtype)


def hvp_pullback(
    z: Tensor,
    v: Tensor,
    direction: Tensor,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    lse_cotangent: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pullback of ``direction`` through ``bisoftmax_hvp``: to z, v (B, H, N, p), a (B, H, N)."""
    tokens, vectors, along = (wide_rows(t, mask) for t in (z, v, direction))
    unmasked = wide_mask(z, mask)
    a = _zero_masked_rows(lse_cotangent, mask)
    a = None if a is None else a.flatten(0, 1).to(tokens)
    by_z, by_v, by_a = _row_pullback(tokens, vectors, along, beta, unmasked, causal, a)
    if unmasked is not None:
        by_z, by_v, by_a = by_z * unmasked, by_v * unmasked, by_a * unmasked.squeeze(-1)
    by_a = by_a.view(z.shape[:3])
    return by_z.view(z.shape).to(z.dtype), by_v.view(v.shape).to(v.dtype), by_a


def _zero_masked_rows(a: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """A number for each row (B, H, N), zero at masked tokens, whatever was there."""
    return a if a is None or mask is None else a.masked_fill(~mask[:, None], 0.0)


def _bounded(tokens: Tensor, beta: float, causal: bool, limit: float | None) -> bool:
    """Whether ``exp`` of every score, and sums of them, stay within float32.

    Where the caller gives no bound, Cauchy-Schwarz does: ``|S_ij| <= beta max |z_i|^2``. On other
    devices than the CPU asking for it would wait for the device.
    """
    if causal:
        return False
    if limit is None and tokens.device.type == "cpu":
        limit = beta * tokens.square().sum(-1).max().item()
    return within_exponent(limit)


def _symmetric_gradient(z: Tensor, beta: float, unmasked: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(P + P^T) Z`` (G, N, p) and ``L`` (G, N)."""
    output = torch.zeros_like(z)
    lse = z.new_empty(z.shape[:2])
    tiling = SymmetricStrips(z, beta, buffers=2)
    for heads in tiling.groups:
        part = None if unmasked is None else unmasked[heads]
        strips = tiling.of(heads)
        add_gradient = _add_whole_gradient if len(strips) == 1 else _add_gradient
        add_gradient(strips, z[heads], part, output[heads], lse[heads])
    return output if unmasked is None else output.mul_(unmasked), lse


def _symmetric_product(
    z: Tensor,
    v: Tensor,
    beta: float,
    unmasked: Tensor | None,
    lse: Tensor | None,
    cotangent: Tensor | None,
) -> Tensor:
    """Hessian times ``v``, plus ``beta (diag(a) P + P^T diag(a)) Z`` for a ``cotangent`` a (G, N)."""
    output = torch.zeros_like(z)
    tiling = SymmetricStrips(z, beta, buffers=3)
    for heads in tiling.groups:
        part, given, a = (None if t is None else t[heads] for t in (unmasked, lse, cotangent))
        _add_product(tiling.of(heads), z[heads], v[heads], beta, part, given, a, output[heads])
    return output if unmasked is None else output.mul_(unmasked)


def _reciprocals(total: Tensor, unmasked: Tensor | None) -> tuple[Tensor, Tensor]:
    """``u = 1 / l`` and ``L = log l``; zero at masked tokens."""
    if unmasked is None:
        return total.reciprocal(), total.log()
    masked = unmasked.squeeze(-1) == 0
    total = total.masked_fill(masked, 1.0)
    return total.reciprocal().masked_fill_(masked, 0.0), total.log()


def _add_gradient(
    strips: list[SymmetricStrip], z: Tensor, unmasked: Tensor | None, output: Tensor, lse: Tensor
) -> None:
    total = torch.zeros_like(lse)
    for strip in strips:
        strip.add_sums(strip.scores().exp_(), total, unmasked)
    reciprocal, logarithm = _reciprocals(total, unmasked)
    lse.copy_(logarithm)
    for strip in strips:
        exponentials = strip.scores().exp_()
        both = exponentials.mul_(strip.pair_sums(reciprocal, 1))
        strip.add_products(both, z, output)


def _add_whole_gradient(
    strips: list[SymmetricStrip], z: Tensor, unmasked: Tensor | None, output: Tensor, lse: Tensor
) -> None:
    """One strip is the matrix: it is computed once, and has no other side."""
    (strip,) = strips
    exponentials = strip.scores().exp_()
    total = exponentials.sum(-1) if unmasked is None else (exponentials @ unmasked).squeeze(-1)
    reciprocal, logarithm = _reciprocals(total, unmasked)
    lse.copy_(logarithm)
    torch.bmm(strip.pair_sums(reciprocal, 1).mul_(exponentials), z, out=output)


def _add_product(
    strips: list[SymmetricStrip],
    z: Tensor,
    v: Tensor,
    beta: float,
    unmasked: Tensor | None,
    lse: Tensor | None,
    cotangent: Tensor | None,
    output: Tensor,
) -> None:
    """``G V + M Z`` with ``G = e (u_i + u_j)``, ``M = G T - e (w_i + w_j)``, ``w = u (r - beta a)``."""
    total, mean = torch.zeros_like(z[:, :, 0]), torch.zeros_like(z[:, :, 0])
    exponentials = weighted = z
    for strip in strips:
        exponentials = strip.scores().exp_()
        if lse is None:
            strip.add_sums(exponentials, total, unmasked)
        weighted = strip.tangents(z, v).mul_(exponentials)
        strip.add_sums(weighted, mean, None)  # zero at masked tokens
    if lse is None:
        reciprocal, _ = _reciprocals(total, unmasked)
    else:
        reciprocal = lse.neg().exp_()
        reciprocal = reciprocal if unmasked is None else reciprocal.mul_(unmasked.squeeze(-1))
    weight = mean.mul_(reciprocal)  # r
    if cotangent is not None:
        weight = weight.sub_(cotangent, alpha=beta)
    weight.mul_(reciprocal)
    for strip in strips:
        if len(strips) > 1:
            exponentials = strip.scores().exp_()
            weighted = strip.tangents(z, v).mul_(exponentials)
        both = strip.pair_sums(reciprocal, 2)
        weighted.mul_(both)
        both.mul_(exponentials)
        weighted.addcmul_(exponentials, weight[:, strip.first : strip.end, None], value=-1.0)
        weighted.addcmul_(exponentials, weight[:, None, strip.first :], value=-1.0)
        strip.add_products(both, v, output)
        strip.add_products(weighted, z, output)


def _row_gradient(
    z: Tensor, beta: float, unmasked: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """``(P + P^T) Z`` (G, N, p) and ``L`` (G, N)."""
    output = torch.zeros_like(z)
    lse = z.new_empty(z.shape[:2])
    for heads, rows, columns, weights, strip_lse in _softmax_strips(z, beta, unmasked, causal):
        lse[heads, rows] = strip_lse
        _add_both_sides(output[heads], weights, z[heads], rows, columns)
    if unmasked is None:
        return output, lse
    return output.mul_(unmasked), lse.mul_(unmasked.squeeze(-1))


def _row_product(
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
    for heads, rows, columns, weights, _ in _softmax_strips(z, beta, unmasked, causal, lse):
        tangent = torch.bmm(left[heads, rows], right[heads, columns].mT).mul_(beta)
        mean = torch.einsum("gij,gij->gi", weights, tangent)
        if cotangent is not None:
            mean = mean.sub_(cotangent[heads, rows], alpha=beta)
        tilted = tangent.sub_(mean.unsqueeze(-1)).mul_(weights)
        for matrix, side in ((weights, v[heads]), (tilted, z[heads])):
            _add_both_sides(output[heads], matrix, side, rows, columns)
    return output if unmasked is None else output.mul_(unmasked)


def _row_pullback(
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
    for heads, rows, columns, weights, _ in _softmax_strips(z, beta, unmasked, causal):
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
            _add_both_sides(out_z, matrix, side, rows, columns, beta)
        _add_both_sides(out_v, by_tangent_v, own, rows, columns, beta)
        _add_both_sides(out_v, weights, along, rows, columns)
    return by_z, by_v, by_a


def _softmax_strips(
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


def _add_both_sides(
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

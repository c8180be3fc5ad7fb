"""The derivative of the bi-softmax Hessian-vector product, by strips of rows, from stock operators.

For a direction c the pullback of ``H V + J_L^T a`` (``J_L`` the Jacobian of the lse, a its cotangent)
is the gradient by (z, v, a) of the scalar ``c.(H V) + a.(J_L c)``. With ``T^v = beta (V Z^T + Z V^T)``,
``r^v = rowsum(P * T^v)``, and the same for c, that scalar is the sum over i of

    ``sum_j P_ij Q_ij - r^v_i r^c_i / beta + a_i r^c_i``
    with ``Q_ij = T^v_ij T^c_ij / beta + v_i.c_j + c_i.v_j``

and its derivatives, from which those by z, v and a follow by the product rule, are

    by S: ``P * (F - rowsum(P * F))``,   ``F = Q + (a - r^v / beta) T^c - (r^c / beta) T^v``
    by ``T^v``: ``P * (T^c - r^c) / beta``,   by ``T^c``: ``P * ((T^v - r^v) / beta + a)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.kernels.bi_softmax.strips.rows import add_both_sides, softmax_strips


def pullback(
    z: Tensor,
    v: Tensor,
    c: Tensor,
    beta: float,
    unmasked: Tensor | None,
    causal: bool,
    cotangent: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by z, v (G, N, p) and a (G, N) of the scalar above.

    Tensors as in ``rows``; ``cotangent`` a (G, N), None for zero.
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


def _both_sides(left: Tensor, right: Tensor, rows: slice, columns: slice) -> Tensor:
    """``left_i.right_j + right_i.left_j`` of a strip."""
    product = torch.bmm(left[:, rows], right[:, columns].mT)
    return product.baddbmm_(right[:, rows], left[:, columns].mT)

"""Sigmoid attention without an N x N matrix, from stock operators, on any device.

All its matrices are symmetric, so a strip of some rows and the columns from its first row on serves
both of its sides, and nothing is normalised, so one sweep does: in units of N^2 p multiply-adds 1.5
for the gradient, 3.5 for the Hessian-vector product and 7 for the derivative of the latter.

With the gates ``g = sigma(S)`` the derivatives of sigma are ``s = g (1 - g)``, ``s (1 - 2 g)`` and
``s (1 - 6 s)``. Half precision is computed in float32. Nothing is recorded by autograd: see ``ops``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.kernels.bi_softmax.reference import counting
from implicit_attn.kernels.bi_softmax.strips.backend import plain, wide_counts, wide_rows
from implicit_attn.kernels.bi_softmax.strips.symmetric import (
    Room,
    add_products,
    strip_scores,
    strip_tangents,
)


def sigmoid_forward(z: Tensor, beta: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradient (B, H, N, p) in the dtype of ``z`` and value (B, H) in float32 or wider."""
    if z.numel() == 0:
        wide = torch.promote_types(z.dtype, torch.float32)
        return z.new_zeros(z.shape), z.new_zeros(z.shape[:2], dtype=wide)
    with plain(z):
        rows, counts = wide_rows(z, mask), wide_counts(z, mask)
        output, value = torch.zeros_like(rows), rows.new_zeros(rows.shape[0])
        room = Room(rows, buffers=1)
        for heads in room.groups():
            own, part = rows[heads], None if counts is None else counts[heads]
            for first, end in room.strips():
                strip = strip_scores(own, beta, first, end, room).sigmoid_()
                value[heads] += _total(strip, part, first, end)
                strip.addcmul_(strip, strip, value=-1.0)
                add_products(strip, own, output[heads], first, end)
        gradient = counting(output.view(z.shape), mask)
        return gradient.to(z.dtype), value.view(z.shape[:2]) / (2.0 * beta)


def sigmoid_hvp(z: Tensor, v: Tensor, beta: float, mask: Tensor | None) -> Tensor:
    """Hessian times ``v``, (B, H, N, p) in the dtype of ``z``."""
    if z.numel() == 0:
        return z.new_zeros(z.shape)
    with plain(z):
        rows, vectors = wide_rows(z, mask), wide_rows(v, mask)
        output, room = torch.zeros_like(rows), Room(rows, buffers=3)
        for heads in room.groups():
            own, along, out = rows[heads], vectors[heads], output[heads]
            for first, end in room.strips():
                gates = strip_scores(own, beta, first, end, room).sigmoid_()
                slope = _slope(gates, room, 2)
                bend = strip_tangents(own, along, beta, first, end, room).mul_(slope)
                bend.mul_(gates.mul_(-2.0).add_(1.0))
                add_products(slope, along, out, first, end)
                add_products(bend, own, out, first, end)
        return counting(output.view(z.shape), mask).to(z.dtype)


def sigmoid_third(
    z: Tensor, v: Tensor, direction: Tensor, beta: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Pullback of ``direction`` c through the Hessian-vector product: to z and v, like them.

    With ``T^v = beta (V Z^T + Z V^T)``, ``T^c`` the same for c and ``X = V C^T + C V^T``, by z it is
    ``(sigma''' T^v T^c + beta sigma'' X) Z + (sigma'' T^c) V + (sigma'' T^v) C``, and by v
    ``(sigma'' T^c) Z + sigma' C``.
    """
    if z.numel() == 0:
        return z.new_zeros(z.shape), v.new_zeros(v.shape)
    with plain(z):
        rows, vectors, along = (wide_rows(t, mask) for t in (z, v, direction))
        by_z, by_v, room = torch.zeros_like(rows), torch.zeros_like(rows), Room(rows, buffers=5)
        for heads in room.groups():
            sides = rows[heads], vectors[heads], along[heads]
            for first, end in room.strips():
                _add_third(sides, beta, first, end, room, by_z[heads], by_v[heads])
        by_z, by_v = (counting(t.view(z.shape), mask) for t in (by_z, by_v))
        return by_z.to(z.dtype), by_v.to(v.dtype)


def _add_third(
    sides: tuple[Tensor, Tensor, Tensor],
    beta: float,
    first: int,
    end: int,
    room: Room,
    by_z: Tensor,
    by_v: Tensor,
) -> None:
    z, v, c = sides
    gates = strip_scores(z, beta, first, end, room).sigmoid_()
    slope = _slope(gates, room, 2)
    second = gates.mul_(-2.0).add_(1.0).mul_(slope)
    tangent_v = strip_tangents(z, v, beta, first, end, room, buffer=1)
    tangent_c = strip_tangents(z, c, beta, first, end, room, buffer=3)
    inner = strip_tangents(v, c, beta, first, end, room, buffer=4).mul_(second)
    # sigma''' T^v T^c = (s T^v) T^c - 6 (s T^v) (s T^c)
    inner.add_((slope * tangent_v).mul_(tangent_c).mul_(1.0 - 6.0 * slope))
    tangent_v.mul_(second)
    tangent_c.mul_(second)
    add_products(inner, z, by_z, first, end)
    add_products(tangent_c, v, by_z, first, end)
    add_products(tangent_v, c, by_z, first, end)
    add_products(tangent_c, z, by_v, first, end)
    add_products(slope, c, by_v, first, end)


def _slope(gates: Tensor, room: Room, number: int) -> Tensor:
    """``g - g^2`` in a buffer of its own."""
    slope = room.buffer(number, *gates.shape)
    torch.mul(gates, gates, out=slope)
    return torch.sub(gates, slope, out=slope)


def _total(strip: Tensor, counts: Tensor | None, first: int, end: int) -> Tensor:
    """Sum over the pairs of a strip, (G,): those beyond its diagonal tile stand for two."""
    tile = strip[:, :, : end - first]
    if counts is None:
        return 2.0 * strip.sum((1, 2)) - tile.sum((1, 2))
    rows = counts[:, first:end]
    sums = 2.0 * (strip @ counts[:, first:]) - tile @ rows
    return (rows * sums).sum((1, 2))

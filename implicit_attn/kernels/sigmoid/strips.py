"""Sigmoid attention without an N x N matrix, from stock operators, on any device.

All its matrices are symmetric, so a strip of some rows and the columns from its first row on serves
both of its sides, and nothing is normalised, so one sweep does: in units of N^2 p multiply-adds 1.5
for the gradient, 3.5 for the Hessian-vector product and 7 for the derivative of the latter.

With the gates ``g = sigma(S)`` the derivatives of sigma are ``s = g (1 - g)``, ``s (1 - 2 g)`` and
``s (1 - 6 s)``. Half precision is computed in float32. For autograd and autocast see ``ops``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.kernels.arguments import zero_masked
from implicit_attn.kernels.tiling import SymmetricStrip, SymmetricStrips, wide_mask, wide_rows


def sigmoid_forward(z: Tensor, beta: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradient (B, H, N, p) in the dtype of ``z`` and value (B, H) in float32 or wider."""
    rows, unmasked = wide_rows(z, mask), wide_mask(z, mask)
    output, value = torch.zeros_like(rows), rows.new_zeros(rows.shape[0])
    tiling = SymmetricStrips(rows, beta, buffers=1)
    for heads in tiling.groups:
        part = None if unmasked is None else unmasked[heads]
        for strip in tiling.of(heads):
            gates = strip.scores().sigmoid_()
            value[heads] += _total(strip, gates, part)
            slope = gates.addcmul_(gates, gates, value=-1.0)
            strip.add_products(slope, strip.z, output[heads])
    gradient = zero_masked(output.view(z.shape), mask)
    return gradient.to(z.dtype), value.view(z.shape[:2]) / (2.0 * beta)


def sigmoid_hvp(z: Tensor, v: Tensor, beta: float, mask: Tensor | None) -> Tensor:
    """Hessian times ``v``, (B, H, N, p) in the dtype of ``z``."""
    rows, vectors = wide_rows(z, mask), wide_rows(v, mask)
    output, tiling = torch.zeros_like(rows), SymmetricStrips(rows, beta, buffers=3)
    for heads in tiling.groups:
        along, out = vectors[heads], output[heads]
        for strip in tiling.of(heads):
            gates, slope = _gates(strip)
            bend = strip.tangents(strip.z, along).mul_(slope)
            bend.mul_(gates.mul_(-2.0).add_(1.0))
            strip.add_products(slope, along, out)
            strip.add_products(bend, strip.z, out)
    return zero_masked(output.view(z.shape), mask).to(z.dtype)


def sigmoid_hvp_pullback(
    z: Tensor, v: Tensor, direction: Tensor, beta: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Pullback of ``direction`` c through the Hessian-vector product: to z and v, like them.

    With ``T^v = beta (V Z^T + Z V^T)``, ``T^c`` the same for c and ``X = V C^T + C V^T``, by z it is
    ``(sigma''' T^v T^c + beta sigma'' X) Z + (sigma'' T^c) V + (sigma'' T^v) C``, and by v
    ``(sigma'' T^c) Z + sigma' C``.
    """
    rows, vectors, along = (wide_rows(t, mask) for t in (z, v, direction))
    by_z, by_v = torch.zeros_like(rows), torch.zeros_like(rows)
    tiling = SymmetricStrips(rows, beta, buffers=5)
    for heads in tiling.groups:
        for strip in tiling.of(heads):
            _add_pullback(strip, vectors[heads], along[heads], by_z[heads], by_v[heads])
    by_z, by_v = (zero_masked(t.view(z.shape), mask) for t in (by_z, by_v))
    return by_z.to(z.dtype), by_v.to(v.dtype)


def _add_pullback(strip: SymmetricStrip, v: Tensor, c: Tensor, by_z: Tensor, by_v: Tensor) -> None:
    z = strip.z
    gates, slope = _gates(strip)
    second = gates.mul_(-2.0).add_(1.0).mul_(slope)
    tangent_v, tangent_c = strip.tangents(z, v, number=1), strip.tangents(z, c, number=3)
    inner = strip.tangents(v, c, number=4).mul_(second)
    # sigma''' T^v T^c = (s T^v) T^c - 6 (s T^v) (s T^c)
    inner.add_((slope * tangent_v).mul_(tangent_c).mul_(1.0 - 6.0 * slope))
    tangent_v.mul_(second)
    tangent_c.mul_(second)
    strip.add_products(inner, z, by_z)
    strip.add_products(tangent_c, v, by_z)
    strip.add_products(tangent_v, c, by_z)
    strip.add_products(tangent_c, z, by_v)
    strip.add_products(slope, c, by_v)


def _gates(strip: SymmetricStrip) -> tuple[Tensor, Tensor]:
    """``g`` and ``g - g^2``, in buffers 0 and 2."""
    gates, slope = strip.scores().sigmoid_(), strip.buffer(2)
    torch.mul(gates, gates, out=slope)
    return gates, torch.sub(gates, slope, out=slope)


def _total(strip: SymmetricStrip, gates: Tensor, unmasked: Tensor | None) -> Tensor:
    """Sum over the pairs of a strip, (heads,): those beyond its diagonal tile stand for two."""
    tile = gates[:, :, : strip.end - strip.first]
    if unmasked is None:
        return 2.0 * gates.sum((1, 2)) - tile.sum((1, 2))
    rows = unmasked[:, strip.first : strip.end]
    sums = 2.0 * (gates @ unmasked[:, strip.first :]) - tile @ rows
    return (rows * sums).sum((1, 2))

"""Sigmoid attention, in dense operations and, without an N x N matrix, by strips of stock operators.

The dense functions are the definition that the strips must match; for the formulas see ``dispatch``.

All matrices are symmetric, so a strip of some rows and the columns from its first row on serves
both of its sides, and nothing is normalised, so one sweep does: in units of N^2 p multiply-adds 1.5
for the gradient, 3.5 for the Hessian-vector product and 7 for the derivative of the latter.

With the gates ``g = sigma(S)`` the derivatives of sigma are ``s = g (1 - g)``, ``s (1 - 2 g)`` and
``s (1 - 6 s)``. Half precision is computed in float32.

The strips are PyTorch operators: ``implicit_attn::sigmoid_attention`` gives gradient and value; its
backward pass is ``implicit_attn::sigmoid_attention_hvp``, whose own is
``implicit_attn::sigmoid_attention_third``, which cannot be differentiated. Nothing but z, v and the
gradient is saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_attn.kernels.arguments import wide_dtype, without_autocast, zero_masked
from implicit_attn.kernels.operators import Operator, empty_like_first
from implicit_attn.kernels.tiling import SymmetricStrip, SymmetricStrips, wide_mask, wide_rows


@without_autocast
def dense(z: Tensor, beta: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype, z = z.dtype, zero_masked(z, mask).to(wide_dtype(z))
    gates = torch.sigmoid((z @ z.mT) * beta)
    gradient = zero_masked((gates - gates.square()) @ z, mask).to(dtype)
    if mask is not None:
        pairs = mask[:, None, :, None] & mask[:, None, None, :]
        gates = gates.masked_fill(~pairs, 0.0)
    return gradient, gates.flatten(2).sum(2) / (2.0 * beta)


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


def _empty_forward(z: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(z.shape[:2], dtype=wide_dtype(z))


def _empty_hvp_pullback(z: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(z.shape)


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    z, ctx.beta, mask = inputs
    ctx.save_for_backward(z, mask, output[0])
    ctx.set_materialize_grads(False)


def _backward_forward(ctx: Any, by_gradient: Any, by_value: Any) -> tuple[Any, None, None]:
    z, mask, gradient = ctx.saved_tensors
    pullback = None
    if by_gradient is not None:
        pullback = hvp(z, by_gradient.to(z.dtype), ctx.beta, mask)
    if by_value is not None:
        pulled = gradient * by_value[..., None, None].to(z.dtype)
        pullback = pulled if pullback is None else pullback + pulled
    return pullback, None, None


def _save_hvp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, v, ctx.beta, mask = inputs
    ctx.save_for_backward(z, v, mask)


def _backward_hvp(ctx: Any, direction: Tensor) -> tuple[Any, ...]:
    z, v, mask = ctx.saved_tensors
    if not ctx.needs_input_grad[0]:  # linear in v, and symmetric
        return None, hvp(z, direction, ctx.beta, mask), None, None
    return *hvp_pullback(z, v, direction, ctx.beta, mask), None, None


def _backward_hvp_pullback(ctx: Any, *cotangents: Tensor) -> Any:
    raise NotImplementedError(
        "the gradient and the value of sigmoid attention can be differentiated twice, its "
        'Hessian-vector product once; use backend="reference" for more'
    )


forward = Operator(
    "implicit_attn::sigmoid_attention",
    "(Tensor z, float beta, Tensor? mask) -> (Tensor, Tensor)",
    sigmoid_forward,
    _empty_forward,
    _backward_forward,
    _save_forward,
)
hvp = Operator(
    "implicit_attn::sigmoid_attention_hvp",
    "(Tensor z, Tensor v, float beta, Tensor? mask) -> Tensor",
    sigmoid_hvp,
    empty_like_first,
    _backward_hvp,
    _save_hvp,
)
hvp_pullback = Operator(
    "implicit_attn::sigmoid_attention_third",
    "(Tensor z, Tensor v, Tensor direction, float beta, Tensor? mask) -> (Tensor, Tensor)",
    sigmoid_hvp_pullback,
    _empty_hvp_pullback,
    _backward_hvp_pullback,
)

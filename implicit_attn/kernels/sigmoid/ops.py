"""Sigmoid attention by strips as PyTorch operators, differentiable twice.

``implicit_attn::sigmoid_attention`` gives gradient and value; its backward pass is
``implicit_attn::sigmoid_attention_hvp``, whose own is ``implicit_attn::sigmoid_attention_third``,
which cannot be differentiated. Nothing but z, v and the gradient is saved.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from implicit_attn.kernels.arguments import wide_dtype
from implicit_attn.kernels.operators import Operator
from implicit_attn.kernels.sigmoid import strips


def _empty_forward(z: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(z.shape[:2], dtype=wide_dtype(z))


def _empty_hvp(z: Tensor, *_: Any) -> Tensor:
    return z.new_empty(z.shape)


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
    strips.sigmoid_forward,
    _empty_forward,
    _backward_forward,
    _save_forward,
)
hvp = Operator(
    "implicit_attn::sigmoid_attention_hvp",
    "(Tensor z, Tensor v, float beta, Tensor? mask) -> Tensor",
    strips.sigmoid_hvp,
    _empty_hvp,
    _backward_hvp,
    _save_hvp,
)
hvp_pullback = Operator(
    "implicit_attn::sigmoid_attention_third",
    "(Tensor z, Tensor v, Tensor direction, float beta, Tensor? mask) -> (Tensor, Tensor)",
    strips.sigmoid_hvp_pullback,
    _empty_hvp_pullback,
    _backward_hvp_pullback,
)

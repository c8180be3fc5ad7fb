"""Sigmoid attention by blocks as PyTorch operators: opaque to compilers, differentiable, vmapped.

``implicit_attn::sigmoid_attention`` gives gradient and value; its backward pass is
``implicit_attn::sigmoid_attention_hvp``, whose own is ``implicit_attn::sigmoid_attention_third``,
which cannot be differentiated. Nothing but z, v and the gradient is saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_attn.kernels.operators import call, mapped
from implicit_attn.kernels.sigmoid import strips

sigmoid_op = torch.library.custom_op(
    "implicit_attn::sigmoid_attention",
    strips.sigmoid_forward,
    mutates_args=(),
    schema="(Tensor z, float beta, Tensor? mask) -> (Tensor, Tensor)",
)
sigmoid_hvp_op = torch.library.custom_op(
    "implicit_attn::sigmoid_attention_hvp",
    strips.sigmoid_hvp,
    mutates_args=(),
    schema="(Tensor z, Tensor v, float beta, Tensor? mask) -> Tensor",
)
sigmoid_third_op = torch.library.custom_op(
    "implicit_attn::sigmoid_attention_third",
    strips.sigmoid_third,
    mutates_args=(),
    schema="(Tensor z, Tensor v, Tensor direction, float beta, Tensor? mask) -> (Tensor, Tensor)",
)


@sigmoid_op.register_fake
def _(z: Tensor, beta: float, mask: Any) -> Any:
    wide = torch.promote_types(z.dtype, torch.float32)
    return z.new_empty(z.shape), z.new_empty(z.shape[:2], dtype=wide)


@sigmoid_hvp_op.register_fake
def _(z: Tensor, v: Tensor, *others: Any) -> Tensor:
    return z.new_empty(z.shape)


@sigmoid_third_op.register_fake
def _(z: Tensor, v: Tensor, *others: Any) -> Any:
    return z.new_empty(z.shape), v.new_empty(v.shape)


def forward(z: Tensor, beta: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """``sigmoid_op`` or its implementation; the arguments are the operator's."""
    return call(sigmoid_op, strips.sigmoid_forward, [z], z, beta, mask)


def hvp(z: Tensor, v: Tensor, beta: float, mask: Tensor | None) -> Tensor:
    """``sigmoid_hvp_op`` or its implementation; the arguments are the operator's."""
    return call(sigmoid_hvp_op, strips.sigmoid_hvp, [z, v], z, v, beta, mask)


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
    by_z, by_v = sigmoid_third_op(z, v, direction, ctx.beta, mask)
    return by_z, by_v, None, None


def _backward_third(ctx: Any, *cotangents: Tensor) -> Any:
    raise NotImplementedError(
        "the gradient and the value of sigmoid attention can be differentiated twice, its "
        'Hessian-vector product once; use backend="reference" for more'
    )


torch.library.register_autograd(sigmoid_op, _backward_forward, setup_context=_save_forward)
torch.library.register_autograd(sigmoid_hvp_op, _backward_hvp, setup_context=_save_hvp)
torch.library.register_autograd(sigmoid_third_op, _backward_third)
torch.library.register_vmap(sigmoid_op, mapped(sigmoid_op, 2))
torch.library.register_vmap(sigmoid_hvp_op, mapped(sigmoid_hvp_op, 1))
torch.library.register_vmap(sigmoid_third_op, mapped(sigmoid_third_op, 2))

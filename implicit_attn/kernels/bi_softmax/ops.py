"""Twice differentiable PyTorch operators for bi-softmax by strips, C++ and Triton.

``implicit_attn::bisoftmax`` returns gradient and lse; its backward pass is
``implicit_attn::bisoftmax_hvp``, whose backward pass is ``implicit_attn::bisoftmax_third`` (a third
derivative of the energy), whose backward pass raises. Only z, v and the lse are saved for them. The operators
compute in the dtype of z (half precision in float32), independently of autocast; ``dispatch`` rejects
forward mode.

``backend`` is "blocks", "cpp", "triton", or "auto": C++ on a CPU or Triton on a CUDA device if it supports
the input, else strips. The operators check the input, because a compiler cannot trace those checks. All
backends use strips for the third derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from implicit_attn.kernels import strips
from implicit_attn.kernels.arguments import ORDINARY, traced, wide_dtype
from implicit_attn.kernels.bi_softmax import native
from implicit_attn.optional import require
from solvers.core.modes import without_autocast


class Operator:
    """A PyTorch operator that is opaque to compilers and supports differentiation and ``vmap``.

    Args:
        name: qualified name, such as "implicit_attn::bisoftmax".
        schema: arguments, the first a tensor, and results, in the notation of ``torch.library``.
        compute: implementation, run without autocast and autograd.
        empty: returns uninitialised results for the same arguments.
        backward, save: as for ``torch.library.register_autograd``.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        compute: Callable[..., Any],
        empty: Callable[..., Any],
        backward: Callable[..., Any],
        save: Callable[..., None] | None = None,
    ) -> None:
        def implementation(first: Tensor, *rest: Any) -> Any:
            if first.numel() == 0:
                return tree_map(torch.zero_, empty(first, *rest))
            with without_autocast(first.device.type):
                return compute(first, *rest)

        self.implementation = implementation
        self.operator = torch.library.custom_op(
            name, implementation, mutates_args=(), schema=schema
        )
        self.operator.register_fake(empty)
        self.operator.register_autograd(backward, setup_context=save)
        self.operator.register_vmap(self._mapped)

    def __call__(self, *args: Any) -> Any:
        """Call the operator, or its implementation directly without autograd and transforms.

        For a small layer the dispatcher and autograd cost more than the evaluation.
        """
        tensors = [each for each in args if isinstance(each, Tensor)]
        recorded = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        ordinary = all(type(each) in ORDINARY for each in tensors)
        if recorded or not ordinary or traced():
            return self.operator(*args)
        return self.implementation(*args)

    def _mapped(self, info: Any, in_dims: Any, *args: Any) -> Any:
        """Implement ``vmap`` by folding (M, B, ...) to (M B, ...) and unfolding the results."""

        def folded(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            if dim is None:
                return value.expand(info.batch_size, *value.shape).flatten(0, 1)
            return value.movedim(dim, 0).flatten(0, 1)

        results = self.operator(*(folded(*each) for each in zip(args, in_dims, strict=True)))
        results = tree_map(lambda t: t.unflatten(0, (info.batch_size, -1)), results)
        return results, tree_map(lambda _: 0, results)


def _module(backend: str) -> Any:
    """Return the module with the kernels of a backend; ImportError for "triton" without Triton."""
    if backend == "triton":
        return require("implicit_attn.kernels.bi_softmax.triton_backend", extra="gpu")
    return native if backend == "cpp" else strips


def lacks(backend: str, z: Tensor, mask: Tensor | None) -> str | None:
    """Return why "cpp" or "triton" is unavailable for this input, or None if it is available."""
    try:
        return _module(backend).lacks(z, mask) or (native.missing() if backend == "cpp" else None)
    except ImportError as error:
        return str(error)


def require_backend(backend: str, z: Tensor, mask: Tensor | None) -> None:
    """Raise an error if ``backend`` does not support this input or is not installed."""
    if backend == "blocks":
        return
    reason = _module(backend).lacks(z, mask)
    if reason is not None:
        raise ValueError(f'backend="{backend}" does not support this input: {reason}')
    if backend == "cpp" and native.missing() is not None:
        raise RuntimeError(f'backend="cpp" cannot be used here: {native.missing()}')


def _chosen(backend: str, z: Tensor, mask: Tensor | None) -> Any:
    """Return the module with ``bisoftmax_forward`` and ``bisoftmax_hvp`` of a backend."""
    if backend == "auto":
        fused = "triton" if z.is_cuda else "cpp"
        return _module("blocks" if lacks(fused, z, mask) else fused)
    require_backend(backend, z, mask)
    return _module(backend)


def _forward(z: Tensor, beta: float, mask: Tensor | None, *rest: Any) -> Any:
    return _chosen(rest[-1], z, mask).bisoftmax_forward(z, beta, mask, *rest[:-1])


def _hvp(z: Tensor, v: Tensor, beta: float, mask: Tensor | None, *rest: Any) -> Any:
    return _chosen(rest[-1], z, mask).bisoftmax_hvp(z, v, beta, mask, *rest[:-1])


def _empty_forward(z: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(z.shape[:3], dtype=wide_dtype(z))


def _empty_hvp_pullback(z: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return z.new_empty(z.shape), *_empty_forward(z)


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    z, ctx.beta, mask, ctx.causal, ctx.limit, ctx.backend = inputs
    ctx.save_for_backward(z, mask, output[1])


def _backward_forward(ctx: Any, by_gradient: Tensor, by_lse: Tensor) -> tuple[Any, ...]:
    z, mask, lse = ctx.saved_tensors
    rest = (ctx.beta, mask, ctx.causal, ctx.limit, lse.detach(), by_lse, ctx.backend)
    return hvp(z, by_gradient.to(z.dtype), *rest), *(None,) * 5


def _save_hvp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, v, ctx.beta, mask, ctx.causal, ctx.limit, lse, cotangent, ctx.backend = inputs
    ctx.save_for_backward(z, v, mask, lse, cotangent)


def _backward_hvp(ctx: Any, direction: Tensor) -> tuple[Any, ...]:
    z, v, mask, lse, cotangent = ctx.saved_tensors
    none = (None,) * 5
    if not ctx.needs_input_grad[0] and not ctx.needs_input_grad[7]:  # symmetric and linear in v
        rest = (ctx.beta, mask, ctx.causal, ctx.limit, lse, None, ctx.backend)
        return None, hvp(z, direction, *rest), *none, None, None
    by_z, by_v, by_cotangent = hvp_pullback(z, v, direction, ctx.beta, mask, ctx.causal, cotangent)
    if cotangent is not None:
        by_cotangent = by_cotangent.to(cotangent.dtype)
    return by_z, by_v, *none, None if cotangent is None else by_cotangent, None


def _backward_hvp_pullback(ctx: Any, *cotangents: Tensor) -> Any:
    raise NotImplementedError(
        "the gradient and lse of the bi-softmax are twice differentiable, its Hessian-vector product "
        'once; use backend="reference" for higher derivatives'
    )


_SHARED = "Tensor? mask, bool causal, float? limit"
forward = Operator(
    "implicit_attn::bisoftmax",
    f"(Tensor z, float beta, {_SHARED}, str backend) -> (Tensor, Tensor)",
    _forward,
    _empty_forward,
    _backward_forward,
    _save_forward,
)
hvp = Operator(
    "implicit_attn::bisoftmax_hvp",
    f"(Tensor z, Tensor v, float beta, {_SHARED}, Tensor? lse, Tensor? lse_cotangent, "
    "str backend) -> Tensor",
    _hvp,
    lambda z, *_: z.new_empty(z.shape),
    _backward_hvp,
    _save_hvp,
)
hvp_pullback = Operator(
    "implicit_attn::bisoftmax_third",
    "(Tensor z, Tensor v, Tensor direction, float beta, Tensor? mask, bool causal, "
    "Tensor? lse_cotangent) -> (Tensor, Tensor, Tensor)",
    strips.hvp_pullback,
    _empty_hvp_pullback,
    _backward_hvp_pullback,
)

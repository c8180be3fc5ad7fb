"""Bi-softmax as PyTorch operators: opaque to compilers, differentiable twice, vmapped.

``implicit_attn::bisoftmax`` gives gradient and lse; its backward pass is
``implicit_attn::bisoftmax_hvp``, whose backward pass is ``implicit_attn::bisoftmax_third``, whose own
raises. Nothing of the graph but z, v and the lse is saved. The operators compute in the dtype of z
(half precision in float32 inside), whatever autocast says; forward mode is refused by ``dispatch``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from implicit_attn.kernels.bi_softmax.strips import backend as strips
from implicit_attn.kernels.operators import call, mapped
from implicit_attn.optional import require

_SHARED = "Tensor? mask, bool causal, float? limit"
_LENGTHS = "Tensor? lengths=None"


def _bisoftmax(
    z: Tensor,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    limit: float | None,
    backend: str,
    lengths: Tensor | None = None,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Gradient (B, H, N, p) and lse (B, H, N), contiguous.

    ``backend`` is "blocks", "triton", or "auto": "triton" where it takes the input, else "blocks".
    ``lengths`` (B,) stands in place of ``mask``; ``deterministic`` is read by Triton only.
    """
    if _by_triton(backend, z, mask, causal):
        options = {"lengths": lengths, "deterministic": deterministic}
        return triton_backend().bisoftmax_forward(z, beta, mask, causal, limit, **options)
    return strips.bisoftmax_forward(z, beta, mask_of(z, mask, lengths), causal, limit)


def _bisoftmax_hvp(
    z: Tensor,
    v: Tensor,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    limit: float | None,
    lse: Tensor | None,
    lse_cotangent: Tensor | None,
    backend: str,
    lengths: Tensor | None = None,
) -> Tensor:
    """Hessian times ``v`` plus the pullback of ``lse_cotangent``, (B, H, N, p) contiguous."""
    if _by_triton(backend, z, mask, causal):
        options = {"limit": limit, "lengths": lengths}
        return triton_backend().bisoftmax_hvp(
            z, v, beta, mask, causal, lse, lse_cotangent, **options
        )
    mask = mask_of(z, mask, lengths)
    return strips.bisoftmax_hvp(z, v, beta, mask, causal, limit, lse, lse_cotangent)


def _bisoftmax_third(
    z: Tensor,
    v: Tensor,
    direction: Tensor,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    lse_cotangent: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pullback of ``direction`` through the Hessian-vector product: to z, v and the cotangent."""
    return strips.bisoftmax_third(z, v, direction, beta, mask, causal, lse_cotangent)


bisoftmax_op = torch.library.custom_op(
    "implicit_attn::bisoftmax",
    _bisoftmax,
    mutates_args=(),
    schema=f"(Tensor z, float beta, {_SHARED}, str backend, {_LENGTHS}, bool deterministic=True) "
    "-> (Tensor, Tensor)",
)
bisoftmax_hvp_op = torch.library.custom_op(
    "implicit_attn::bisoftmax_hvp",
    _bisoftmax_hvp,
    mutates_args=(),
    schema=f"(Tensor z, Tensor v, float beta, {_SHARED}, Tensor? lse, Tensor? lse_cotangent, "
    f"str backend, {_LENGTHS}) -> Tensor",
)
bisoftmax_third_op = torch.library.custom_op(
    "implicit_attn::bisoftmax_third",
    _bisoftmax_third,
    mutates_args=(),
    schema="(Tensor z, Tensor v, Tensor direction, float beta, Tensor? mask, bool causal, "
    "Tensor? lse_cotangent) -> (Tensor, Tensor, Tensor)",
)


def mask_of(z: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """``mask``, or the mask (B, N) of the first ``lengths`` tokens where those are given."""
    if lengths is None:
        return mask
    return torch.arange(z.shape[2], device=z.device) < lengths.to(z.device)[:, None]


def triton_lacks(z: Tensor, mask: Tensor | None, causal: bool) -> str | None:
    """Why the Triton kernels do not take this input; None where they do."""
    try:
        return triton_backend().supports(z, mask, causal)
    except ImportError as error:
        return str(error)


def _by_triton(backend: str, z: Tensor, mask: Tensor | None, causal: bool) -> bool:
    if backend == "auto":
        return triton_lacks(z, mask, causal) is None
    if backend == "triton":
        missing = triton_backend().supports(z, mask, causal)
        if missing is not None:
            raise ValueError(f'backend="triton" does not take this input: {missing}')
    return backend == "triton"


def triton_backend() -> ModuleType:
    """The module with the Triton kernels; ImportError where Triton is not installed."""
    return require("implicit_attn.kernels.bi_softmax.triton.backend", extra="gpu")


def _wide(z: Tensor) -> torch.dtype:
    return torch.promote_types(z.dtype, torch.float32)


@bisoftmax_op.register_fake
def _(z: Tensor, *others: Any) -> Any:
    return z.new_empty(z.shape), z.new_empty(z.shape[:3], dtype=_wide(z))


@bisoftmax_hvp_op.register_fake
def _(z: Tensor, v: Tensor, *others: Any) -> Tensor:
    return z.new_empty(z.shape)


@bisoftmax_third_op.register_fake
def _(z: Tensor, v: Tensor, *others: Any) -> Any:
    return z.new_empty(z.shape), v.new_empty(v.shape), z.new_empty(z.shape[:3], dtype=_wide(z))


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    z, ctx.beta, mask, ctx.causal, ctx.limit, ctx.backend, lengths, _ = inputs
    ctx.save_for_backward(z, mask, output[1], lengths)


def _backward_forward(ctx: Any, by_gradient: Tensor, by_lse: Tensor) -> tuple[Any, ...]:
    z, mask, lse, lengths = ctx.saved_tensors
    by_gradient = by_gradient.to(z.dtype)
    rest = (ctx.beta, mask, ctx.causal, ctx.limit, lse.detach(), by_lse, ctx.backend)
    product = hvp(z, by_gradient, *rest, lengths)
    return product, *(None,) * 7


def hvp(z: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """``bisoftmax_hvp_op`` or its implementation; the arguments are the operator's."""
    cotangent = rest[5]
    return call(bisoftmax_hvp_op, _bisoftmax_hvp, [z, v, cotangent], z, v, *rest)


def forward(z: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """``bisoftmax_op`` or its implementation; the arguments are the operator's."""
    return call(bisoftmax_op, _bisoftmax, [z], z, *rest)


def _save_hvp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, v, ctx.beta, mask, ctx.causal, ctx.limit, lse, cotangent, ctx.backend, lengths = inputs
    ctx.save_for_backward(z, v, mask, lse, cotangent, lengths)


def _backward_hvp(ctx: Any, direction: Tensor) -> tuple[Any, ...]:
    z, v, mask, lse, cotangent, lengths = ctx.saved_tensors
    none = (None,) * 5
    if not ctx.needs_input_grad[0] and not ctx.needs_input_grad[7]:  # linear in v, and symmetric
        rest = (ctx.beta, mask, ctx.causal, ctx.limit, lse, None, ctx.backend, lengths)
        return None, hvp(z, direction, *rest), *none, None, None, None
    mask = mask_of(z, mask, lengths)
    by_z, by_v, by_cotangent = bisoftmax_third_op(
        z, v, direction, ctx.beta, mask, ctx.causal, cotangent
    )
    if cotangent is not None:
        by_cotangent = by_cotangent.to(cotangent.dtype)
    return by_z, by_v, *none, None if cotangent is None else by_cotangent, None, None


def _backward_third(ctx: Any, *cotangents: Tensor) -> Any:
    raise NotImplementedError(
        "the gradient and the lse of the bi-softmax can be differentiated twice, its Hessian-vector "
        'product once; use backend="reference" for more'
    )


torch.library.register_autograd(bisoftmax_op, _backward_forward, setup_context=_save_forward)
torch.library.register_autograd(bisoftmax_hvp_op, _backward_hvp, setup_context=_save_hvp)
torch.library.register_autograd(bisoftmax_third_op, _backward_third)


torch.library.register_vmap(bisoftmax_op, mapped(bisoftmax_op, 2))
torch.library.register_vmap(bisoftmax_hvp_op, mapped(bisoftmax_hvp_op, 1))
torch.library.register_vmap(bisoftmax_third_op, mapped(bisoftmax_third_op, 3))

"""What the kernels' PyTorch operators share: calling them, mapping them, refusing forward mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def call(operator: Any, implementation: Callable[..., Any], tensors: list[Any], *args: Any) -> Any:
    """``operator(*args)``, or its implementation at once where nothing records or transforms.

    The operator's way through autograd and the dispatcher costs more than a small layer's whole
    evaluation.
    """
    given = [t for t in tensors if t is not None]
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    plain = all(type(t) in (Tensor, torch.nn.Parameter) for t in given)
    if recorded or not plain or torch.compiler.is_compiling() or transformed():
        return operator(*args)
    return implementation(*args)


_FUNCTORCH: Any = torch._C._functorch  # type: ignore[attr-defined]


def transformed() -> bool:
    """Inside ``torch.func`` (vmap, grad, jvp)."""
    if torch.compiler.is_compiling():
        return False
    return _FUNCTORCH.peek_interpreter_stack() is not None


def differentiated_by_func() -> bool:
    """Inside a differentiating transform of ``torch.func``, which custom operators do not know."""
    if not transformed():
        return False
    stack = _FUNCTORCH.get_interpreter_stack() or []
    kinds = _FUNCTORCH.TransformType
    return any(each.key() in (kinds.Grad, kinds.Jvp) for each in stack)


def _folded(info: Any, in_dims: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """Arguments with the mapped dimension laid before the batch, (M, B, ...) -> (M B, ...)."""
    folded = []
    for value, dim in zip(arguments, in_dims, strict=True):
        if isinstance(value, Tensor):
            if dim is None:
                value = value.unsqueeze(0).expand(info.batch_size, *value.shape)
            else:
                value = value.movedim(dim, 0)
            value = value.reshape(-1, *value.shape[2:])
        folded.append(value)
    return folded


def mapped(operator: Any, outputs: int) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *arguments: Any) -> Any:
        results = operator(*_folded(info, in_dims, arguments))
        if outputs == 1:
            return results.unflatten(0, (info.batch_size, -1)), 0
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in results), (0,) * outputs

    return rule


def has_tangent(tensor: Tensor) -> bool:
    if getattr(forward_ad, "_current_level", -1) < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


def refuse_forward_mode(tensor: Tensor, backend: str, product: str) -> None:
    if differentiated_by_func():
        raise NotImplementedError(
            f'torch.func.grad, vjp and jvp do not go through backend="{backend}"; use '
            'torch.autograd, or backend="reference"'
        )
    if has_tangent(tensor):
        raise NotImplementedError(
            f'forward-mode differentiation is not implemented by backend="{backend}"; use reverse '
            f'mode, {product} for the product with the Hessian, or backend="reference"'
        )

"""What the kernels' PyTorch operators share: registration, direct calls, refusing forward mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from solvers.core.modes import without_autocast

_FUNCTORCH: Any = torch._C._functorch  # type: ignore[attr-defined]
_DIFFERENTIATING = (_FUNCTORCH.TransformType.Grad, _FUNCTORCH.TransformType.Jvp)
ORDINARY = (Tensor, torch.nn.Parameter)


class Operator:
    """A PyTorch operator: opaque to compilers, differentiable by a given rule, mapped by ``vmap``.

    ``vmap`` lays the mapped dimension before the first one of every tensor, which must be a batch.

    Args:
        name: its qualified name, such as "implicit_attn::bisoftmax".
        schema: its arguments, the first a tensor, and results, as ``torch.library`` wants them.
        compute: the function that it computes, run without autocast and never recorded.
        empty: results of the right shapes and dtypes, unfilled, from the same arguments. With zeros
            in them they are the results where the first argument has no elements.
        backward: from a context and the cotangents to those of the arguments.
        save: keeps in a context, from arguments and results, what ``backward`` needs.
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
                results = empty(first, *rest)
                single = isinstance(results, Tensor)
                return results.zero_() if single else tuple(each.zero_() for each in results)
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
        """The operator, or its implementation at once where nothing records or transforms.

        The operator's way through autograd and the dispatcher costs more than a small layer's whole
        evaluation.
        """
        tensors = [each for each in args if isinstance(each, Tensor)]
        recorded = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        ordinary = all(type(each) in ORDINARY for each in tensors)
        if recorded or not ordinary or torch.compiler.is_compiling() or transformed():
            return self.operator(*args)
        return self.implementation(*args)

    def _mapped(self, info: Any, in_dims: Any, *args: Any) -> Any:
        """The rule of ``vmap``: (M, B, ...) is folded to (M B, ...), and the results unfolded."""
        folded = []
        for value, dim in zip(args, in_dims, strict=True):
            if isinstance(value, Tensor):
                if dim is None:
                    value = value.unsqueeze(0).expand(info.batch_size, *value.shape)
                else:
                    value = value.movedim(dim, 0)
                value = value.reshape(-1, *value.shape[2:])
            folded.append(value)
        results = self.operator(*folded)
        if isinstance(results, Tensor):
            return results.unflatten(0, (info.batch_size, -1)), 0
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in results), (0,) * len(results)


def empty_like_first(first: Tensor, *_: Any) -> Tensor:
    return first.new_empty(first.shape)


def transformed() -> bool:
    """Whether a transform of ``torch.func`` (vmap, grad, jvp) is under way."""
    if torch.compiler.is_compiling():
        return False
    return _FUNCTORCH.peek_interpreter_stack() is not None


def differentiated() -> bool:
    """Whether ``torch.func`` differentiates: custom operators do not know that, but they know ``vmap``."""
    if not transformed():
        return False
    return any(each.key() in _DIFFERENTIATING for each in _transforms())


def mapped_size() -> int:
    """How many times as many samples there are as ``vmap`` shows, the product of its levels."""
    if not transformed():  # a compiler would stumble over what follows
        return 1
    return math.prod(
        _FUNCTORCH.CVmapInterpreterPtr(each).batchSize()
        for each in _transforms()
        if each.key() == _FUNCTORCH.TransformType.Vmap
    )


def _transforms() -> list[Any]:
    return _FUNCTORCH.get_interpreter_stack() or []


def has_tangent(tensor: Tensor) -> bool:
    """Whether ``tensor`` carries a tangent of forward-mode differentiation."""
    if getattr(forward_ad, "_current_level", -1) < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


def refuse_forward_mode(tensor: Tensor, backend: str, product: str) -> None:
    """NotImplementedError, naming ``product`` in its place, where ``tensor`` asks for forward mode."""
    if differentiated():
        raise NotImplementedError(
            f'torch.func.grad, vjp and jvp do not go through backend="{backend}"; use '
            'torch.autograd, or backend="reference"'
        )
    if has_tangent(tensor):
        raise NotImplementedError(
            f'forward-mode differentiation is not implemented by backend="{backend}"; use reverse '
            f'mode, {product} for the product with the Hessian, or backend="reference"'
        )

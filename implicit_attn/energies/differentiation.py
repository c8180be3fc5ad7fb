"""Gradients and Hessian-vector products by automatic differentiation, and sums of pytrees."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.core.modes import exporting, in_transform, ordinary, recording, uncompiled


def value_and_gradient(
    function: Callable[..., Tensor], z: Any, *inputs: Any, named: str | None = None
) -> tuple[Tensor, Any]:
    """``function(z, *inputs)`` of shape (B,) and its gradient by ``z`` (a tensor or a pytree).

    Differentiable itself where gradients are being recorded; works under ``no_grad`` and
    ``inference_mode`` too.

    Raises:
        ValueError: the value does not depend on ``z`` for autograd, and the function is ``named``.
    """
    if in_transform() or torch.compiler.is_dynamo_compiling():
        return _by_transform(function, z, inputs)
    record = torch.is_grad_enabled()
    # What a compiler makes of the function could not be differentiated twice.
    with recording(), uncompiled() if record else nullcontext():
        point, leaves, spec = _fresh(z, record)
        value = function(point, *ordinary(inputs))
        found: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if value.requires_grad:
            # Samples are independent, so the gradient of the sum holds the gradient of each.
            found = torch.autograd.grad(value.sum(), leaves, create_graph=record, allow_unused=True)
    if named is not None and all(slope is None for slope in found):
        raise ValueError(
            f"the energy must depend on z, and {named} returns what autograd cannot trace back to it: no "
            "z.detach(), z.data, .item(), .tolist() or NumPy on the way, and no torch.no_grad()"
        )
    pairs = zip(found, leaves, strict=True)
    gradients = [torch.zeros_like(t) if slope is None else slope for slope, t in pairs]
    gradient = pytree.tree_unflatten(gradients, spec)
    return (value if record else value.detach()), gradient


def _by_transform(
    function: Callable[..., Tensor], z: Any, inputs: tuple[Any, ...]
) -> tuple[Tensor, Any]:
    """:func:`value_and_gradient` where tensors belong to a transform or a compiler.

    There ``torch.func.grad`` is a transform like others, while leaves of a graph cannot be made.
    """
    if exporting() and torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "an energy that is differentiated automatically cannot be exported with strict=True; "
            "export with strict=False, torch's default"
        )
    leaves, spec = pytree.tree_flatten(z)
    _check_state(leaves)

    def total(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        value = function(pytree.tree_unflatten(leaves, spec), *inputs)
        return value.sum(), value

    gradients, value = torch.func.grad(total, has_aux=True)(leaves)
    return value, pytree.tree_unflatten(list(gradients), spec)


def hessian_product(gradient: Callable[..., Any], z: Any, v: Any, *inputs: Any) -> Any:
    """Jacobian of ``gradient(z, *inputs)`` by ``z`` (symmetric: a Hessian) times ``v``."""
    if in_transform() or torch.compiler.is_dynamo_compiling():
        return torch.func.vjp(lambda point: gradient(point, *inputs), z)[1](v)[0]
    record = torch.is_grad_enabled()
    with recording():
        point, leaves, spec = _fresh(z, record)
        outputs = pytree.tree_leaves(gradient(point, *ordinary(inputs)))
        vectors = pytree.tree_leaves(v)
        shapes = [tuple(t.shape) if isinstance(t, Tensor) else t for t in vectors]
        expected = [tuple(leaf.shape) for leaf in leaves]
        if shapes != expected:
            raise ValueError(f"v must be like z, shapes {expected}, got {shapes}")
        # Parts that do not depend on z (a linear energy) have no graph and no curvature.
        pairs = [(g, w) for g, w in zip(outputs, vectors, strict=True) if g.requires_grad]
        if not pairs:
            return pytree.tree_unflatten([torch.zeros_like(leaf) for leaf in leaves], spec)
        products = torch.autograd.grad(
            [g for g, _ in pairs],
            leaves,
            grad_outputs=ordinary([w for _, w in pairs]),
            create_graph=record,
            materialize_grads=True,
        )
    return pytree.tree_unflatten(list(products), spec)


def _fresh(z: Any, record: bool) -> tuple[Any, list[Tensor], Any]:
    """``z`` as new leaves of the graph, so that inputs computed from it are constants.

    As a tree, flat, and the tree's structure.
    """
    leaves, spec = pytree.tree_flatten(ordinary(z))
    _check_state(leaves)
    fresh = [
        leaf.view_as(leaf) if record and leaf.requires_grad else leaf.detach().requires_grad_()
        for leaf in leaves
    ]
    return pytree.tree_unflatten(fresh, spec), fresh, spec


def _check_state(leaves: list[Any]) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() == 0:
            kind = f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
            raise TypeError(f"z must be a floating tensor (B, ...) or a pytree of them, got {kind}")
    if not leaves:
        raise ValueError("z must hold at least one tensor, got an empty structure")


def scale_tree(tree: Any, factor: float | Tensor) -> Any:
    """``factor * tree``, a tensor or a pytree of tensors."""
    if isinstance(tree, Tensor):
        return tree * factor
    return pytree.tree_map(lambda leaf: leaf * factor, tree)


def add_trees(total: Any, part: Any, factor: float | Tensor, owned: bool = False) -> Any:
    """``total + factor * part``; None stands for a total of zero.

    ``owned``: nobody else holds ``total``, so it is overwritten where no gradient is recorded.
    """
    if total is None:
        return part if isinstance(factor, float) and factor == 1.0 else scale_tree(part, factor)
    if not isinstance(total, Tensor):
        return pytree.tree_map(lambda a, b: add_trees(a, b, factor, owned), total, part)
    if isinstance(factor, Tensor):
        return torch.addcmul(total, part, factor.to(part.dtype))
    if owned and not torch.is_grad_enabled():
        return total.add_(part, alpha=factor)
    return torch.add(total, part, alpha=factor)

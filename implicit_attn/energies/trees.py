"""Weighted sums of gradients: tensors mostly, pytrees of tensors where the state is one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def scale_tree(tree: Any, factor: float | Tensor) -> Any:
    """``factor * tree``."""
    if isinstance(tree, Tensor):
        return tree * factor
    return pytree.tree_map(lambda leaf: leaf * factor, tree)


def add_trees(total: Any, part: Any, factor: float | Tensor, owned: bool = False) -> Any:
    """``total + factor * part``; in place where ``total`` is ours and no gradient is recorded."""
    if total is None:
        return part if isinstance(factor, float) and factor == 1.0 else scale_tree(part, factor)
    if not isinstance(total, Tensor):
        return pytree.tree_map(lambda a, b: add_trees(a, b, factor, owned), total, part)
    if isinstance(factor, Tensor):
        return torch.addcmul(total, part, factor.to(part.dtype))
    if owned and not torch.is_grad_enabled():
        return total.add_(part, alpha=factor)
    return torch.add(total, part, alpha=factor)

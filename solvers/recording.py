"""Gradients inside a solve, whatever surrounds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@contextmanager
def recording() -> Iterator[None]:
    """Gradients on, also under ``no_grad`` and ``inference_mode``."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.enable_grad():
            yield
    else:
        with torch.enable_grad():
            yield


def ordinary(tree: Any) -> Any:
    """Tensors made in inference mode cannot be saved for a backward pass; their copies can."""

    def copy(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf

    return pytree.tree_map(copy, tree)

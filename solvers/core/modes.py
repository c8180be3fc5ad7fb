"""The modes of torch during a solve: autocast, gradients, inference, compilation, cached weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

Function = TypeVar("Function", bound=Callable[..., Any])


def eager(function: Function) -> Function:
    """``torch.compiler.disable`` that keeps the function's type.

    A solver loop branches on values at every step, where a compiler would break its graph anyway.
    """
    return cast(Function, torch.compiler.disable(function))


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of the surrounding autocast; None where it is off."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def with_autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast to ``dtype``; None leaves everything as it is."""
    return nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast off; free where it is off already."""
    off = autocast_dtype(device) is None
    return nullcontext() if off else torch.autocast(device, enabled=False)


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
    """The pytree with copies of its inference tensors, which no backward pass could save."""

    def copy(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf

    return pytree.tree_map(copy, tree)


@contextmanager
def constant_weights() -> Iterator[None]:
    """``parametrize.cached()`` with a cache of its own.

    A solve computes weights without a graph, or with that of a recording. In the cache of a
    surrounding ``parametrize.cached()`` they would be read later, without their gradient.
    """
    outer = getattr(parametrize, "_cache", None)
    enclosed = bool(getattr(parametrize, "_cache_enabled", 0))
    if enclosed:
        parametrize._cache = {}
    try:
        with parametrize.cached():
            yield
    finally:
        if enclosed and outer is not None:
            parametrize._cache = outer

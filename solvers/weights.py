"""Parametrised weights stand still during a solve: they are computed once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.utils import parametrize


@contextmanager
def constant_weights() -> Iterator[None]:
    """``parametrize.cached()`` that leaves nothing without a gradient in an outer cache.

    A solve without recording would fill the cache of a surrounding ``parametrize.cached()`` with
    weights that have no graph, and whoever reads them later would lose their gradient silently.
    """
    outer = getattr(parametrize, "_cache", None)
    enclosed = bool(getattr(parametrize, "_cache_enabled", 0)) and not torch.is_grad_enabled()
    if enclosed:
        parametrize._cache = {}
    try:
        with parametrize.cached():
            yield
    finally:
        if enclosed and outer is not None:
            parametrize._cache = outer

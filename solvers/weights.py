"""Parametrised weights stand still during a solve: they are computed once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.utils import parametrize


@contextmanager
def constant_weights() -> Iterator[None]:
    """``parametrize.cached()`` with a cache of its own, which nobody reads later.

    In the cache of a surrounding ``parametrize.cached()`` a solve would leave weights without a
    graph, or with that of a recording, and whoever reads them later would lose their gradient.
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

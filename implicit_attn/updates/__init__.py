"""Updates ``z <- f(z, x)``, the maps whose fixed points are the outputs of layers."""

from __future__ import annotations

from solvers.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)

"""Updates ``z <- f(z, x)``: what a layer iterates to its fixed point."""

from __future__ import annotations

from solvers.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)

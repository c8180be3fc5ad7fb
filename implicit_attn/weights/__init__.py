"""Trained weights that come with the package, by name."""

from __future__ import annotations

from solvers.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)

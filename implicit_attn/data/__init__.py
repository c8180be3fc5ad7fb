"""Loaders for the data sets of the examples, augmentations, reproducible batches."""

from __future__ import annotations

from solvers.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)

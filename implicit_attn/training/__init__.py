"""Training of the models in the examples: one loop, resumable at every epoch, in several processes."""

from __future__ import annotations

from solvers.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)

"""Energies: one number per sample, with gradients in closed form, and the algebra that adds them."""

from __future__ import annotations

from solvers.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)

"""Associative memories: binary ones, and the fit of a continuous one to data."""

from __future__ import annotations

from implicit_attn.models.memories.binary_memory import BinaryMemory
from implicit_attn.models.memories.fitting import Fit, fit_patterns

__all__ = ["BinaryMemory", "Fit", "fit_patterns"]

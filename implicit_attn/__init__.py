"""Implicit attention: a layer is an energy or a mean-field update; its output is the fixed point."""

from __future__ import annotations

from implicit_attn.deq import DEQ
from implicit_attn.energies import Energy
from implicit_attn.updates import ActivationStep, GradientStep, Update

__version__ = "0.1.0"

__all__ = ["DEQ", "ActivationStep", "Energy", "GradientStep", "Update", "__version__"]

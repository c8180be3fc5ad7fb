"""Implicit attention: layers whose output is the fixed point of an energy descent or mean-field update."""

from __future__ import annotations

from implicit_attn.block import EquilibriumBlock
from implicit_attn.deq import DEQ
from implicit_attn.energies import Energy
from implicit_attn.models.attention.energy_attention import EnergyAttention
from implicit_attn.updates import ActivationStep, GradientStep, Update

__version__ = "0.1.0"

__all__ = [
    "DEQ",
    "ActivationStep",
    "Energy",
    "EnergyAttention",
    "EquilibriumBlock",
    "GradientStep",
    "Update",
    "__version__",
]

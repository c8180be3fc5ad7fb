"""Implicit attention: layers whose output is the fixed point of an energy descent or mean-field update."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import implicit_attn.shadow  # noqa: F401 - before all that takes something out of solvers
from implicit_attn.block import EquilibriumBlock
from implicit_attn.deq import DEQ, compile_layers
from implicit_attn.energies import Energy
from implicit_attn.updates import ActivationStep, GradientStep, Update
from solvers.lazy import lazy_names

if TYPE_CHECKING:
    from implicit_attn.models.attention.energy_attention import EnergyAttention
    from implicit_attn.weights.loading import load_pretrained
    from implicit_attn.weights.registry import pretrained_models
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "implicit_attn.checkpoint": "",
            "implicit_attn.data": "",
            "implicit_attn.models": "",
            "implicit_attn.models.attention.energy_attention": "EnergyAttention",
            "implicit_attn.weights.loading": "load_pretrained",
            "implicit_attn.weights.registry": "pretrained_models",
        },
    )

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the user asks

__all__ = [
    "DEQ",
    "ActivationStep",
    "Energy",
    "EnergyAttention",
    "EquilibriumBlock",
    "GradientStep",
    "Update",
    "__version__",
    "compile_layers",
    "load_pretrained",
    "pretrained_models",
]

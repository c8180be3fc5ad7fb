"""Updates ``z <- f(z, x)``: what a layer iterates to its fixed point."""

from __future__ import annotations

from implicit_attn.energies.couplings import Couplings
from implicit_attn.updates.activation_step import ActivationStep
from implicit_attn.updates.base import FunctionUpdate, Update
from implicit_attn.updates.gradient_step import GradientStep, StepSize
from implicit_attn.updates.mean_field import MeanFieldAttention, OnsagerNetwork
from implicit_attn.updates.softmax_couplings import (
    MixerAttention,
    SoftmaxCouplingAttention,
    TokenMixer,
)

__all__ = [
    "ActivationStep",
    "Couplings",
    "FunctionUpdate",
    "GradientStep",
    "MeanFieldAttention",
    "MixerAttention",
    "OnsagerNetwork",
    "SoftmaxCouplingAttention",
    "StepSize",
    "TokenMixer",
    "Update",
]

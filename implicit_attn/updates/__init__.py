"""Updates ``z <- f(z, x)``: what a layer iterates to its fixed point."""

from __future__ import annotations

from implicit_attn.energies.spins import Couplings
from implicit_attn.updates.attention_step import AttentionStep, QueryDescent
from implicit_attn.updates.bare_step import BareAttentionStep
from implicit_attn.updates.gradient_step import ActivationStep, GradientStep, StepSize
from implicit_attn.updates.hyperset import (
    ConditionedStepSizes,
    HyperSETLayer,
    HyperSETStep,
    LowRankDeltas,
    PlainStepSizes,
    StepSizes,
)
from implicit_attn.updates.kinetic_attention import KineticAttention
from implicit_attn.updates.mean_field import (
    AdaptiveTAPAttention,
    MeanFieldAttention,
    MixerAttention,
    OnsagerNetwork,
    SoftmaxCouplingAttention,
    TokenMixer,
)
from implicit_attn.updates.momentum import DescentStep, MomentumStep
from implicit_attn.updates.saddle_attention import SaddleAttention
from implicit_attn.updates.transformer_step import TransformerStep
from implicit_attn.updates.update import FunctionUpdate, Update

__all__ = [
    "ActivationStep",
    "AdaptiveTAPAttention",
    "AttentionStep",
    "BareAttentionStep",
    "ConditionedStepSizes",
    "Couplings",
    "DescentStep",
    "FunctionUpdate",
    "GradientStep",
    "HyperSETLayer",
    "HyperSETStep",
    "KineticAttention",
    "LowRankDeltas",
    "MeanFieldAttention",
    "MixerAttention",
    "MomentumStep",
    "OnsagerNetwork",
    "PlainStepSizes",
    "QueryDescent",
    "SaddleAttention",
    "SoftmaxCouplingAttention",
    "StepSize",
    "StepSizes",
    "TokenMixer",
    "TransformerStep",
    "Update",
]

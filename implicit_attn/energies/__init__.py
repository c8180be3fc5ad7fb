"""Energies: scalars per sample with closed-form gradients, and their algebra."""

from __future__ import annotations

from implicit_attn.energies.attention import BiSoftmaxAttention, LinearAttention, SigmoidAttention
from implicit_attn.energies.base import Energy, Scaled, Select, Sum, Weighted
from implicit_attn.energies.feedforward import (
    GatedFeedForward,
    ReLUFeedForward,
    SoftmaxFeedForward,
)
from implicit_attn.energies.hopfield import ClassicalHopfield, DenseAssociative, Hopfield
from implicit_attn.energies.lagrangians import (
    IdentityLagrangian,
    Lagrangian,
    LayerNormLagrangian,
    ReLULagrangian,
    RMSNormLagrangian,
    SoftmaxLagrangian,
)
from implicit_attn.energies.norms import Projection, RMSNorm, SpectralBound
from implicit_attn.energies.simple import Field, FunctionEnergy, Quadratic
from implicit_attn.energies.softmax_attention import SoftmaxAttention

__all__ = [
    "BiSoftmaxAttention",
    "ClassicalHopfield",
    "DenseAssociative",
    "Energy",
    "Field",
    "FunctionEnergy",
    "GatedFeedForward",
    "Hopfield",
    "IdentityLagrangian",
    "Lagrangian",
    "LayerNormLagrangian",
    "LinearAttention",
    "Projection",
    "Quadratic",
    "RMSNorm",
    "RMSNormLagrangian",
    "ReLUFeedForward",
    "ReLULagrangian",
    "Scaled",
    "Select",
    "SigmoidAttention",
    "SoftmaxAttention",
    "SoftmaxFeedForward",
    "SoftmaxLagrangian",
    "SpectralBound",
    "Sum",
    "Weighted",
]

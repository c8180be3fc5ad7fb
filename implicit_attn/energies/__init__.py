"""Energies: one number per sample, with gradients in closed form, and the algebra that adds them."""

from __future__ import annotations

from implicit_attn.energies.attention import (
    BiSoftmaxAttention,
    LinearAttention,
    RowSoftmaxAttention,
    ScoreAttention,
)
from implicit_attn.energies.bare import BareAttention, ConditionalMixture
from implicit_attn.energies.checking import EnergyReport, check_energy
from implicit_attn.energies.conditional import ConditionalAttention, EquilibriumEnergy
from implicit_attn.energies.effective import EffectiveRBM, HiddenPrior
from implicit_attn.energies.energy import (
    Energy,
    Field,
    FunctionEnergy,
    Prepared,
    Quadratic,
    Scaled,
    Select,
    Sum,
    Weighted,
)
from implicit_attn.energies.feedforward import (
    GatedFeedForward,
    GELUFeedForward,
    ReLUFeedForward,
    SoftmaxFeedForward,
)
from implicit_attn.energies.heads import AttentionInput
from implicit_attn.energies.hopfield import (
    ClassicalHopfield,
    DenseAssociative,
    HeadwiseEnergy,
    Hopfield,
    QueryEnergy,
)
from implicit_attn.energies.hyperset import HyperSETEnergy
from implicit_attn.energies.lagrangians import (
    IdentityLagrangian,
    IsingLagrangian,
    Lagrangian,
    LayerNormLagrangian,
    LearnedLayerNormLagrangian,
    ReLULagrangian,
    RMSNormLagrangian,
    SoftmaxLagrangian,
    SphericalLagrangian,
)
from implicit_attn.energies.linear_attention import GatedLinearAttention
from implicit_attn.energies.projected import Projection, RMSNorm, SpectralBound
from implicit_attn.energies.softmax_attention import SoftmaxAttention
from implicit_attn.energies.spins import (
    Couplings,
    Site,
    SiteDistribution,
    SiteLagrangian,
    SpinInteraction,
    VectorSpin,
)

__all__ = [
    "AttentionInput",
    "BareAttention",
    "BiSoftmaxAttention",
    "ClassicalHopfield",
    "ConditionalAttention",
    "ConditionalMixture",
    "Couplings",
    "DenseAssociative",
    "EffectiveRBM",
    "Energy",
    "EnergyReport",
    "EquilibriumEnergy",
    "Field",
    "FunctionEnergy",
    "GELUFeedForward",
    "GatedFeedForward",
    "GatedLinearAttention",
    "HeadwiseEnergy",
    "HiddenPrior",
    "Hopfield",
    "HyperSETEnergy",
    "IdentityLagrangian",
    "IsingLagrangian",
    "Lagrangian",
    "LayerNormLagrangian",
    "LearnedLayerNormLagrangian",
    "LinearAttention",
    "Prepared",
    "Projection",
    "Quadratic",
    "QueryEnergy",
    "RMSNorm",
    "RMSNormLagrangian",
    "ReLUFeedForward",
    "ReLULagrangian",
    "RowSoftmaxAttention",
    "Scaled",
    "ScoreAttention",
    "Select",
    "Site",
    "SiteDistribution",
    "SiteLagrangian",
    "SoftmaxAttention",
    "SoftmaxFeedForward",
    "SoftmaxLagrangian",
    "SpectralBound",
    "SphericalLagrangian",
    "SpinInteraction",
    "Sum",
    "VectorSpin",
    "Weighted",
    "check_energy",
]

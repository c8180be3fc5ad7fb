"""Energies: one number per sample, with gradients in closed form, and the algebra that adds them."""

from __future__ import annotations

from implicit_attn.energies.attention import (
    BiSoftmaxAttention,
    LinearAttention,
    RowSoftmaxAttention,
    SigmoidAttention,
)
from implicit_attn.energies.bare.bare_attention import BareAttention
from implicit_attn.energies.bare.mixture import ConditionalMixture
from implicit_attn.energies.checking.check_energy import check_energy
from implicit_attn.energies.checking.report import EnergyReport
from implicit_attn.energies.context.conditional_attention import ConditionalAttention
from implicit_attn.energies.context.equilibrium_energy import EquilibriumEnergy
from implicit_attn.energies.effective.prior import HiddenPrior
from implicit_attn.energies.effective.rbm import EffectiveRBM
from implicit_attn.energies.energy import Energy, Scaled, Select, Sum, Weighted
from implicit_attn.energies.feedforward import (
    GatedFeedForward,
    GELUFeedForward,
    ReLUFeedForward,
    SoftmaxFeedForward,
)
from implicit_attn.energies.heads.inputs import AttentionInput
from implicit_attn.energies.heads.query_energy import HeadwiseEnergy, QueryEnergy
from implicit_attn.energies.heads.score_attention import ScoreAttention
from implicit_attn.energies.hopfield import ClassicalHopfield, DenseAssociative, Hopfield
from implicit_attn.energies.hyperset_energy import HyperSETEnergy
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
from implicit_attn.energies.linear.gated_attention import GatedLinearAttention
from implicit_attn.energies.prepared import Prepared
from implicit_attn.energies.projected import Projection, RMSNorm, SpectralBound
from implicit_attn.energies.simple import Field, FunctionEnergy, Quadratic
from implicit_attn.energies.softmax_attention import SoftmaxAttention
from implicit_attn.energies.spins.couplings import Couplings
from implicit_attn.energies.spins.energies import (
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
    "SigmoidAttention",
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

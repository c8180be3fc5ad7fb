"""Energies: one number per sample, with gradients in closed form, and the algebra that adds them."""

from __future__ import annotations

from implicit_attn.energies.attention import BiSoftmaxAttention as BiSoftmaxAttention
from implicit_attn.energies.attention import LinearAttention as LinearAttention
from implicit_attn.energies.attention import RowSoftmaxAttention as RowSoftmaxAttention
from implicit_attn.energies.attention import ScoreAttention as ScoreAttention
from implicit_attn.energies.attention import SoftmaxAttention as SoftmaxAttention
from implicit_attn.energies.checking import EnergyReport as EnergyReport
from implicit_attn.energies.checking import check_energy as check_energy
from implicit_attn.energies.conditional import ConditionalAttention as ConditionalAttention
from implicit_attn.energies.conditional import EquilibriumEnergy as EquilibriumEnergy
from implicit_attn.energies.energy import AttentionContext as AttentionContext
from implicit_attn.energies.energy import Energy as Energy
from implicit_attn.energies.energy import Field as Field
from implicit_attn.energies.energy import FunctionEnergy as FunctionEnergy
from implicit_attn.energies.energy import Quadratic as Quadratic
from implicit_attn.energies.energy import Scaled as Scaled
from implicit_attn.energies.energy import Select as Select
from implicit_attn.energies.energy import Sum as Sum
from implicit_attn.energies.energy import Weighted as Weighted
from implicit_attn.energies.feedforward import GatedFeedForward as GatedFeedForward
from implicit_attn.energies.feedforward import GELUFeedForward as GELUFeedForward
from implicit_attn.energies.feedforward import HyperSETEnergy as HyperSETEnergy
from implicit_attn.energies.feedforward import ReLUFeedForward as ReLUFeedForward
from implicit_attn.energies.feedforward import SoftmaxFeedForward as SoftmaxFeedForward
from implicit_attn.energies.heads import AttentionInput as AttentionInput
from implicit_attn.energies.lagrangians import IdentityLagrangian as IdentityLagrangian
from implicit_attn.energies.lagrangians import IsingLagrangian as IsingLagrangian
from implicit_attn.energies.lagrangians import Lagrangian as Lagrangian
from implicit_attn.energies.lagrangians import LayerNormLagrangian as LayerNormLagrangian
from implicit_attn.energies.lagrangians import ReLULagrangian as ReLULagrangian
from implicit_attn.energies.lagrangians import RMSNormLagrangian as RMSNormLagrangian
from implicit_attn.energies.lagrangians import SoftmaxLagrangian as SoftmaxLagrangian
from implicit_attn.energies.lagrangians import SphericalLagrangian as SphericalLagrangian
from implicit_attn.energies.memories import DenseAssociative as DenseAssociative
from implicit_attn.energies.memories import EffectiveRBM as EffectiveRBM
from implicit_attn.energies.memories import Hopfield as Hopfield
from implicit_attn.energies.memories import QueryEnergy as QueryEnergy
from implicit_attn.energies.restoration import DataTerm as DataTerm
from implicit_attn.energies.restoration import NetworkEnergy as NetworkEnergy
from implicit_attn.energies.spins import BareAttention as BareAttention
from implicit_attn.energies.spins import ConditionalMixture as ConditionalMixture
from implicit_attn.energies.spins import Couplings as Couplings
from implicit_attn.energies.spins import SiteLagrangian as SiteLagrangian
from implicit_attn.energies.spins import SpinInteraction as SpinInteraction
from implicit_attn.energies.spins import VectorSpin as VectorSpin
from implicit_attn.energies.tokens import Projection as Projection
from implicit_attn.energies.tokens import RMSNorm as RMSNorm
from implicit_attn.energies.tokens import SpectralBound as SpectralBound
from solvers.core.exports import define_all

define_all(vars())

"""Updates ``z <- f(z, x)``, the maps whose fixed points are the outputs of layers."""

from __future__ import annotations

from implicit_attn.energies.spins import Couplings as Couplings
from implicit_attn.updates.hyperset import ConditionedStepSizes as ConditionedStepSizes
from implicit_attn.updates.hyperset import HyperSETLayer as HyperSETLayer
from implicit_attn.updates.hyperset import LowRankDeltas as LowRankDeltas
from implicit_attn.updates.hyperset import PlainStepSizes as PlainStepSizes
from implicit_attn.updates.hyperset import StepSize as StepSize
from implicit_attn.updates.hyperset import StepSizes as StepSizes
from implicit_attn.updates.spins import AdaptiveTAPAttention as AdaptiveTAPAttention
from implicit_attn.updates.spins import BareAttentionStep as BareAttentionStep
from implicit_attn.updates.spins import KineticAttention as KineticAttention
from implicit_attn.updates.spins import MeanFieldAttention as MeanFieldAttention
from implicit_attn.updates.spins import NormedMLP as NormedMLP
from implicit_attn.updates.spins import SaddleAttention as SaddleAttention
from implicit_attn.updates.spins import SoftmaxCouplingAttention as SoftmaxCouplingAttention
from implicit_attn.updates.transformer_step import TransformerStep as TransformerStep
from implicit_attn.updates.update import ActivationStep as ActivationStep
from implicit_attn.updates.update import DescentStep as DescentStep
from implicit_attn.updates.update import FunctionUpdate as FunctionUpdate
from implicit_attn.updates.update import GradientStep as GradientStep
from implicit_attn.updates.update import QueryDescent as QueryDescent
from implicit_attn.updates.update import Update as Update
from solvers.core.exports import define_all

define_all(vars())

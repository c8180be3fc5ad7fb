"""Backbones, the models around them, and models by specification."""

from __future__ import annotations

from implicit_attn.models.attention import ATTENTION_FORMS as ATTENTION_FORMS
from implicit_attn.models.attention import AttentionForm as AttentionForm
from implicit_attn.models.attention import CausalAttention as CausalAttention
from implicit_attn.models.attention import EnergyAttention as EnergyAttention
from implicit_attn.models.attention import LightNewtonAttention as LightNewtonAttention
from implicit_attn.models.attention import NewtonAttention as NewtonAttention
from implicit_attn.models.attention import QueryTrajectory as QueryTrajectory
from implicit_attn.models.attention import build_attention_form as build_attention_form
from implicit_attn.models.backbones import EnergyTransformer as EnergyTransformer
from implicit_attn.models.backbones import EquilibriumTransformer as EquilibriumTransformer
from implicit_attn.models.backbones import HyperSET as HyperSET
from implicit_attn.models.backbones import HyperSETEquilibrium as HyperSETEquilibrium
from implicit_attn.models.backbones import RecurrentBackbone as RecurrentBackbone
from implicit_attn.models.backbones import SharedTransformer as SharedTransformer
from implicit_attn.models.backbones import SpinTransformer as SpinTransformer
from implicit_attn.models.backbones import Trajectory as Trajectory
from implicit_attn.models.boards import BoardSolution as BoardSolution
from implicit_attn.models.boards import BoardSolver as BoardSolver
from implicit_attn.models.boards import BoardUpdate as BoardUpdate
from implicit_attn.models.boards import SudokuModel as SudokuModel
from implicit_attn.models.boards import learn_groups as learn_groups
from implicit_attn.models.images import ImageClassifier as ImageClassifier
from implicit_attn.models.images import MaskedImageModel as MaskedImageModel
from implicit_attn.models.language import BlockLanguageModel as BlockLanguageModel
from implicit_attn.models.language import EquilibriumLanguageModel as EquilibriumLanguageModel
from implicit_attn.models.language import LanguageModel as LanguageModel
from implicit_attn.models.language import generate as generate
from implicit_attn.models.memories import BinaryMemory as BinaryMemory
from implicit_attn.models.memories import fit_patterns as fit_patterns
from implicit_attn.models.potts import ConditionalModel as ConditionalModel
from implicit_attn.models.potts import FactoredAttention as FactoredAttention
from implicit_attn.models.potts import PottsModel as PottsModel
from implicit_attn.models.potts import PseudoLikelihoodFit as PseudoLikelihoodFit
from implicit_attn.models.potts import fit_pseudolikelihood as fit_pseudolikelihood
from implicit_attn.models.registry import BACKBONES as BACKBONES
from implicit_attn.models.registry import build_backbone as build_backbone
from implicit_attn.models.registry import build_model as build_model
from implicit_attn.models.registry import load_model as load_model
from implicit_attn.models.registry import read_settings as read_settings
from implicit_attn.models.registry import save_model as save_model
from implicit_attn.models.restoration import ImageRestorer as ImageRestorer
from implicit_attn.models.restoration import Restorer as Restorer
from implicit_attn.models.spins import SpinClassifier as SpinClassifier
from solvers.core.exports import define_all

define_all(vars())

"""Backbones, the models around them, and models by specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solvers.lazy import lazy_names

if TYPE_CHECKING:
    from implicit_attn.models.attention.causal import AttentionForm, CausalAttention
    from implicit_attn.models.attention.energy_attention import EnergyAttention, QueryTrajectory
    from implicit_attn.models.attention.forms import ATTENTION_FORMS, build_attention_form
    from implicit_attn.models.attention.light import LightNewtonAttention
    from implicit_attn.models.attention.newton import NewtonAttention
    from implicit_attn.models.boards.board_solver import BoardSolver
    from implicit_attn.models.boards.board_update import BoardUpdate
    from implicit_attn.models.boards.groups import learn_groups
    from implicit_attn.models.crate import CRATE
    from implicit_attn.models.energy_transformer import EnergyTransformer
    from implicit_attn.models.equilibrium_transformer import EquilibriumTransformer
    from implicit_attn.models.grids.equilibrium_ring import EquilibriumRing
    from implicit_attn.models.grids.layered_ring import LayeredRing
    from implicit_attn.models.hyperset import HyperSET, HyperSETEquilibrium, Trajectory
    from implicit_attn.models.image_classifier import ImageClassifier, ViT
    from implicit_attn.models.language.equilibrium import CausalBlock, EquilibriumLanguageModel
    from implicit_attn.models.language.language_model import LanguageModel
    from implicit_attn.models.language.sampling import generate
    from implicit_attn.models.masked.masked_images import MaskedImageModel
    from implicit_attn.models.memories import BinaryMemory, fit_patterns
    from implicit_attn.models.official import (
        MaskedCodes,
        build_official,
        load_official,
        to_official,
    )
    from implicit_attn.models.patch_classifier import PatchClassifier
    from implicit_attn.models.potts.board_runs import BoardStatus, SudokuAnswer
    from implicit_attn.models.potts.conditional import ConditionalModel
    from implicit_attn.models.potts.factored import FactoredAttention
    from implicit_attn.models.potts.fit_runs import PseudoLikelihoodFit
    from implicit_attn.models.potts.fitting import fit_pseudolikelihood
    from implicit_attn.models.potts.masked_transformer import MaskedTransformer
    from implicit_attn.models.potts.potts_model import PottsModel
    from implicit_attn.models.potts.sudoku_potts import (
        SudokuPotts,
        random_symmetries,
        sudoku_pairs,
    )
    from implicit_attn.models.recurrent import RecurrentBackbone, RecurrentLayer
    from implicit_attn.models.registry import BACKBONES, build_backbone, build_model, load_model
    from implicit_attn.models.spin_classifier import SpinClassifier
    from implicit_attn.models.spins.spin_transformer import SpinTransformer
    from implicit_attn.models.sudoku import SudokuModel
    from implicit_attn.models.transformer import SharedTransformer
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "implicit_attn.models.attention.causal": "AttentionForm CausalAttention",
            "implicit_attn.models.attention.energy_attention": "EnergyAttention QueryTrajectory",
            "implicit_attn.models.attention.forms": "ATTENTION_FORMS build_attention_form",
            "implicit_attn.models.attention.light": "LightNewtonAttention",
            "implicit_attn.models.attention.newton": "NewtonAttention",
            "implicit_attn.models.boards.board_solver": "BoardSolver",
            "implicit_attn.models.boards.board_update": "BoardUpdate",
            "implicit_attn.models.boards.groups": "learn_groups",
            "implicit_attn.models.crate": "CRATE",
            "implicit_attn.models.energy_transformer": "EnergyTransformer",
            "implicit_attn.models.equilibrium_transformer": "EquilibriumTransformer",
            "implicit_attn.models.grids.equilibrium_ring": "EquilibriumRing",
            "implicit_attn.models.grids.layered_ring": "LayeredRing",
            "implicit_attn.models.hyperset": "HyperSET HyperSETEquilibrium Trajectory",
            "implicit_attn.models.image_classifier": "ImageClassifier ViT",
            "implicit_attn.models.language.equilibrium": "CausalBlock EquilibriumLanguageModel",
            "implicit_attn.models.language.language_model": "LanguageModel",
            "implicit_attn.models.language.sampling": "generate",
            "implicit_attn.models.masked.masked_images": "MaskedImageModel",
            "implicit_attn.models.memories": "BinaryMemory fit_patterns",
            "implicit_attn.models.official": "MaskedCodes build_official load_official to_official",
            "implicit_attn.models.patch_classifier": "PatchClassifier",
            "implicit_attn.models.potts.board_runs": "BoardStatus SudokuAnswer",
            "implicit_attn.models.potts.conditional": "ConditionalModel",
            "implicit_attn.models.potts.factored": "FactoredAttention",
            "implicit_attn.models.potts.fit_runs": "PseudoLikelihoodFit",
            "implicit_attn.models.potts.fitting": "fit_pseudolikelihood",
            "implicit_attn.models.potts.masked_transformer": "MaskedTransformer",
            "implicit_attn.models.potts.potts_model": "PottsModel",
            "implicit_attn.models.potts.sudoku_potts": "SudokuPotts random_symmetries sudoku_pairs",
            "implicit_attn.models.recurrent": "RecurrentBackbone RecurrentLayer",
            "implicit_attn.models.registry": "BACKBONES build_backbone build_model load_model",
            "implicit_attn.models.spin_classifier": "SpinClassifier",
            "implicit_attn.models.spins.spin_transformer": "SpinTransformer",
            "implicit_attn.models.sudoku": "SudokuModel",
            "implicit_attn.models.transformer": "SharedTransformer",
        },
    )

__all__ = [
    "ATTENTION_FORMS",
    "BACKBONES",
    "CRATE",
    "AttentionForm",
    "BinaryMemory",
    "BoardSolver",
    "BoardStatus",
    "BoardUpdate",
    "CausalAttention",
    "CausalBlock",
    "ConditionalModel",
    "EnergyAttention",
    "EnergyTransformer",
    "EquilibriumLanguageModel",
    "EquilibriumRing",
    "EquilibriumTransformer",
    "FactoredAttention",
    "HyperSET",
    "HyperSETEquilibrium",
    "ImageClassifier",
    "LanguageModel",
    "LayeredRing",
    "LightNewtonAttention",
    "MaskedCodes",
    "MaskedImageModel",
    "MaskedTransformer",
    "NewtonAttention",
    "PatchClassifier",
    "PottsModel",
    "PseudoLikelihoodFit",
    "QueryTrajectory",
    "RecurrentBackbone",
    "RecurrentLayer",
    "SharedTransformer",
    "SpinClassifier",
    "SpinTransformer",
    "SudokuAnswer",
    "SudokuModel",
    "SudokuPotts",
    "Trajectory",
    "ViT",
    "build_attention_form",
    "build_backbone",
    "build_model",
    "build_official",
    "fit_patterns",
    "fit_pseudolikelihood",
    "generate",
    "learn_groups",
    "load_model",
    "load_official",
    "random_symmetries",
    "sudoku_pairs",
    "to_official",
]

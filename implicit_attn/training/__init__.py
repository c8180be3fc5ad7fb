"""Training of the models in the examples: one loop, resumable bit by bit, in several processes."""

from __future__ import annotations

from implicit_attn.training.boards.completion import BoardCompletion
from implicit_attn.training.boltzmann import (
    BoltzmannFit,
    contrastive_divergence,
    exact_likelihood,
    fit_exact_likelihood,
)
from implicit_attn.training.claims import NotClaimed
from implicit_attn.training.finite import NonFiniteLoss
from implicit_attn.training.grids.drawn import train_on_drawn
from implicit_attn.training.local_rules import LocallyTrained, fit_locally
from implicit_attn.training.logs import CsvLog, Log, TensorBoardLog
from implicit_attn.training.loop import Interrupted, Training
from implicit_attn.training.masked.reconstruction import MaskedImages
from implicit_attn.training.processes import (
    ACCELERATORS,
    PRECISIONS,
    compile_step,
    start_processes,
)
from implicit_attn.training.progress import SettingsDiffer
from implicit_attn.training.recipe import Recipe
from implicit_attn.training.script import run_script
from implicit_attn.training.solves import median_of_counts
from implicit_attn.training.tasks import (
    Augment,
    Classification,
    MaskedTokens,
    SudokuCompletion,
    Task,
    accuracy,
    describe,
)
from implicit_attn.training.text.next_token import NextToken

__all__ = [
    "ACCELERATORS",
    "PRECISIONS",
    "Augment",
    "BoardCompletion",
    "BoltzmannFit",
    "Classification",
    "CsvLog",
    "Interrupted",
    "LocallyTrained",
    "Log",
    "MaskedImages",
    "MaskedTokens",
    "NextToken",
    "NonFiniteLoss",
    "NotClaimed",
    "Recipe",
    "SettingsDiffer",
    "SudokuCompletion",
    "Task",
    "TensorBoardLog",
    "Training",
    "accuracy",
    "compile_step",
    "contrastive_divergence",
    "describe",
    "exact_likelihood",
    "fit_exact_likelihood",
    "fit_locally",
    "median_of_counts",
    "run_script",
    "start_processes",
    "train_on_drawn",
]

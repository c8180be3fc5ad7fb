"""Training of the models in the examples: one loop, resumable at every epoch, in several processes."""

from __future__ import annotations

from implicit_attn.training.carried import CarriedStates
from implicit_attn.training.loop import (
    NonFiniteLoss,
    SettingsDiffer,
    Training,
    compile_step,
    start_processes,
)
from implicit_attn.training.recipe import Recipe
from implicit_attn.training.tasks import (
    Classification,
    MaskedImages,
    NextToken,
    SudokuCompletion,
    Task,
    accuracy,
    describe,
)

__all__ = [
    "CarriedStates",
    "Classification",
    "MaskedImages",
    "NextToken",
    "NonFiniteLoss",
    "Recipe",
    "SettingsDiffer",
    "SudokuCompletion",
    "Task",
    "Training",
    "accuracy",
    "compile_step",
    "describe",
    "start_processes",
]

"""Sudoku boards completed by Hyper-SET or a baseline: ``implicit-attn train sudoku``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from implicit_attn.data import SudokuSymmetries, load_sudoku, resolve_source
from implicit_attn.programs.backbones import SOLVES, BackboneProgram, take
from implicit_attn.training import SudokuCompletion
from implicit_attn.training.script import Job, Values, take_recipe

# In "paper" the dropout, the warm-up and the floor of the learning rate are ours: we found none published.
PRESETS: dict[str, Values] = {
    "paper": {
        "dim": 768, "heads": 12, "width": 3072, "iterations": 24, "initial_step": 0.0, "batch": 16,
        "epochs": 200, "rate": 1e-4, "weight_decay": 0.1, "warmup": 0.02, "floor": 0.1,
        "symmetries": False, "start": "random", "dropout": 0.1,
    },
    "small": {
        "dim": 128, "heads": 4, "width": 512, "iterations": 16, "initial_step": 0.1, "batch": 16,
        "random_iterations": [12, 20], "epochs": 8, "rate": 1e-3, "weight_decay": 0.1,
        "warmup": 0.05, "floor": 0.02, "symmetries": True, "start": "units", "dropout": 0.0,
    },
}  # fmt: skip


@dataclass(kw_only=True)
class Sudoku(BackboneProgram):
    """Train a recurrent attention model to complete Sudoku boards: Hyper-SET, or a baseline.

    implicit-attn train sudoku: a reduced model, half an hour on one core. With --model transformer a
    baseline; --preset paper --compile --precision bf16-mixed: for a GPU.

    The 81 cells are tokens. One layer is applied to them repeatedly. A linear readout gives the logits
    of the nine digits in every cell. Puzzles have 17 to 34 clues, made from the list of 17-clue puzzles
    (Gordon Royle, CC BY 2.5) in $IMPLICIT_ATTN_DATA/sudoku; without it, puzzles are generated. --preset
    paper takes what is published of Hyper-SET (Hu, Zou, Xu, https://arxiv.org/abs/2502.11646).
    """

    train: int = 9000
    """puzzles to train on"""
    test: int = 1000
    """puzzles to test on"""
    source: Literal["auto", "list", "generated"] = "auto"
    """of the puzzles"""

    def folder(self) -> str:
        return f"sudoku-{self.model}"

    def job(self, first: bool) -> Job:
        source = resolve_source(self.source)
        puzzles = {"train": self.train, "test": self.test, "source": source, "seed": self.seed}
        data = load_sudoku(**puzzles)
        preset = PRESETS[self.preset]
        if self.further().get("positions") == "sincos":
            preset = preset | {"start": "random"}
        values = self.values_of(preset, {**SOLVES, "rtol": None})
        symmetries = values.pop("symmetries")
        recipe = take_recipe(values, self.seed)
        around = {"kind": "sudoku", **take(values, "start", "dropout", "positions", "final_norm")}
        specification, model = self.build(around, values, "conditioned-input")
        if first:
            print(f"data: {data.name}, {self.train} training and {self.test} test puzzles")
        task = SudokuCompletion(data, SudokuSymmetries() if symmetries else None)
        kept = {"data": "sudoku", **puzzles, "symmetries": symmetries, "model": specification}
        return Job(model, task, recipe, kept)

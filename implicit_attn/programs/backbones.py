"""Backbones are trained: on images, on images with hidden patches, and on Sudoku boards.

The programs ``implicit-attn train vit-images``, ``masked-images`` and ``sudoku``. In each of them tokens go
through one layer that is applied repeatedly, or solved for its equilibrium, and a linear readout gives
logits of the classes, pixels of the hidden patches or logits of the digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from implicit_attn.data import (
    Compose,
    RandomAffine,
    RandomCrop,
    RandomFlip,
    SudokuSymmetries,
    load,
    load_sudoku,
    resolve_source,
)
from implicit_attn.models import build_model
from implicit_attn.models.registry import BACKBONES
from implicit_attn.training import (
    Classification,
    MaskedImages,
    SudokuCompletion,
    Training,
    describe,
)
from implicit_attn.training.script import (
    Job,
    Program,
    Values,
    layer_options,
    save_weights,
    take_recipe,
)

SOLVED = tuple(name for name, row in BACKBONES.items() if row.solves)
Data = Literal["digits", "mnist", "fashion-mnist", "cifar10"]
# The iterations of an equilibrium are the most evaluations of a solve, which seldom needs as many.
SOLVES: Values = {"iterations": 50, "random_iterations": None, "rtol": 1e-3}


@dataclass(kw_only=True)
class BackboneProgram(Program):
    """Hyper-SET, its equilibrium, or a baseline; ``--options`` reaches every argument of the model."""

    model: Literal[
        "hyperset", "hyperset-equilibrium", "equilibrium", "transformer", "deq-transformer",
        "energy-transformer", "crate", "spin-transformer",
    ] = "hyperset"  # fmt: skip
    preset: Literal["small", "paper"] = "small"
    """what two cores train, or what is published of Hyper-SET"""
    iterations: int | None = None
    """of the layer, in each batch the same number; of an equilibrium the most evaluations"""
    layers: int | None = None
    """with weights of their own, each repeated"""

    def values_of(self, preset: Mapping[str, Any], solves: Mapping[str, Any] = SOLVES) -> Values:
        """The values of the run, without those of the preset that the model does not take."""
        preset = {**preset, **(solves if self.model in SOLVED else {})}
        own = self.further()
        if self.iterations is not None:  # asked for: no random numbers unless these are, too
            preset.pop("random_iterations", None)
        # A preset's first step, 0 for example, is meant for a network that says the steps.
        plain = not str(own.get("step_size", "conditioned-")).startswith("conditioned-")
        if self.model != "hyperset" or plain:
            preset.pop("initial_step", None)
        if isinstance(BACKBONES[self.model].width, str):  # it takes none
            preset.pop("width", None)
        return self.values(preset, "iterations", "layers")

    def build(self, around: Values, values: Values, step_size: str) -> tuple[Values, nn.Module]:
        """The specification and the model: ``around`` of it, of ``values`` the backbone and rtol."""
        rtol = values.pop("rtol", None)
        backbone = {"name": self.model, **values}
        if self.model == "hyperset":
            backbone = {"step_size": step_size, **backbone}
        specification = {**around, "backbone": backbone}
        layer = layer_options(rtol) if self.model in SOLVED else None
        if layer is None and rtol is not None:
            raise ValueError(f"rtol is for {' and '.join(SOLVED)}, got the model {self.model}")
        torch.manual_seed(self.seed)
        return specification, build_model(specification, layer=layer)

    def report(self, training: Training) -> None:
        """The weights alone, and the test measures at 1/2 to 4 times the trained iterations.

        In every process, because the test samples are split among them; the first one writes.
        """
        trained = training.settings["model"]["backbone"]["iterations"]
        numbers = sorted({max(1, round(times * trained)) for times in (0.5, 1, 2, 4)})
        found = {number: training.evaluate(number) for number in numbers}
        if training.fabric.global_rank != 0:
            return
        save_weights(training)
        size = sum(parameter.numel() for parameter in training.model.parameters())
        print(f"\n{training.data.name}, {self.model}, {size} parameters; {training.summary()}")
        print("test measures by iterations:")
        for number, measures in found.items():
            print(f"  {number:3d}  " + "  ".join(describe(*each) for each in measures.items()))
        print(f"tables, checkpoint and weights: {self.place}")


def take(values: Values, *names: str) -> Values:
    """The named values that are there, taken out of ``values``."""
    return {name: values.pop(name) for name in names if values.get(name) is not None}


PAPER: Values = {
    "dim": 384, "heads": 6, "patch": 4, "stem": "patch", "readout": "class",
    "initial_step": 0.0, "iterations": 12, "epochs": 200, "batch": 128, "rate": 1e-3, "warmup": 5 / 200,
    "floor": 0.01, "weight_decay": 5e-5, "optimizer": "adam", "clip": None,
}  # fmt: skip
SMALL: Values = {
    "dim": 64, "heads": 4, "patch": 7, "stem": "conv", "readout": "class",
    "initial_step": 0.1, "iterations": 12, "random_iterations": [6, 18], "epochs": 10, "batch": 128,
    "rate": 3e-3, "warmup": 0.1, "floor": 0.005, "weight_decay": 0.02, "optimizer": "adamw", "clip": 1.0,
}  # fmt: skip
SMALL_DIGITS = SMALL | {"patch": 2, "epochs": 40, "batch": 64, "rate": 1.5e-3}
PRESETS: dict[str, dict[str, Values]] = {
    "small": {"digits": SMALL_DIGITS, "cifar10": SMALL | {"patch": 4}, "other": SMALL},
    "paper": {"digits": PAPER | {"patch": 2}, "other": PAPER},
}
AUGMENTS: dict[str, Any] = {
    "digits": None,  # 8x8 pixels are too few for rotations and shifts
    "mnist": RandomAffine(),
    "fashion-mnist": Compose(RandomCrop(2), RandomFlip()),
    "cifar10": Compose(RandomCrop(4), RandomFlip()),
}
# The batch, rates and clipping of the paper's code for 256 codes.
MASKED_PAPER: Values = {
    "dim": 768, "heads": 12, "patch": 4, "initial_step": 0.0, "iterations": 12, "epochs": 300,
    "batch": 64, "rate": 1e-4, "warmup": 0.0, "floor": 1.0, "weight_decay": 0.1, "clip": 3.0,
    "betas": [0.9, 0.96], "masked": 0.4,
}  # fmt: skip
MASKED_SMALL: Values = {
    "dim": 64, "heads": 4, "patch": 4, "initial_step": 0.1, "iterations": 8,
    "random_iterations": [4, 12], "epochs": 5, "batch": 128, "rate": 3e-3, "warmup": 0.1,
    "floor": 0.01, "weight_decay": 0.02, "clip": 1.0, "betas": [0.9, 0.999], "masked": 0.4,
}  # fmt: skip
# At first a model predicts the mean image whatever it sees. Small batches and a high rate shorten this.
MASKED_DIGITS: Values = {"patch": 2, "epochs": 60, "batch": 16, "rate": 4e-3}
# On the digits; the transformer does worse with the sines and cosines than with learned positions, and a
# solve of a small batch costs as much as one of a large batch.
DIGITS_OF: dict[str, Values] = {
    "hyperset": {"positions": "sinusoidal"},
    **{name: {"batch": 32, "rate": 2e-3} for name in SOLVED},
}
# Hidden units with which the models of the preset "small" have about as many parameters.
WIDTHS = {"hyperset": 64, "hyperset-equilibrium": 772, "transformer": 288, "deq-transformer": 288,
          "energy-transformer": 707, "equilibrium": 286}  # fmt: skip


@dataclass(kw_only=True)
class VitImages(BackboneProgram):
    """Train a recurrent attention model to classify images: Hyper-SET, or a baseline.

    implicit-attn train vit-images: embedded 8x8 digits, a minute or two. With --data mnist a quarter
    of an hour; --model transformer: a baseline; --data cifar10 --preset paper --compile: for a GPU.

    The linear readout is of a class token. Of --model hyperset-equilibrium, which is solved for its
    equilibrium, all tokens are read out. --model equilibrium solves equilibrium blocks and --model
    spin-transformer steady states of spins: --layers of them one after the other, each solved once.
    --preset paper is the recipe of Hyper-SET (Hu, Zou, Xu, https://arxiv.org/abs/2502.11646).
    """

    data: Data = "digits"
    limit: int | None = None
    """use only so many training images"""
    no_augment: bool = False
    """train on the images as they are"""

    def folder(self) -> str:
        return f"{self.data}-{self.model}"

    def job(self, first: bool) -> Job:
        data = load(self.data).first(self.limit)
        preset = PRESETS[self.preset].get(self.data, PRESETS[self.preset]["other"])
        # At the minimum of its energy a class token has gathered little of the image: all are read out.
        solves = SOLVES | ({"readout": "tokens"} if self.model == "hyperset-equilibrium" else {})
        values = self.values_of(preset, solves)
        kept = {"data": self.data, "augmented": not self.no_augment, "limit": self.limit}
        kept |= {"rtol": values.get("rtol")}
        recipe = take_recipe(values, self.seed)
        _, channels, size, _ = data.train_images.shape
        around = {"kind": "image-classifier", "image_size": size, "channels": channels}
        around |= {"classes": data.classes}
        around |= take(
            values, "patch", "stem", "readout", "positions", "pixel_norm", "embedding_norm"
        )
        specification, model = self.build(around, values, "conditioned-state")
        if first:
            numbers = f"{len(data.train_images)} training and {len(data.test_images)} test images"
            print(f"data: {data.name}, {numbers}")
        task = Classification(data, None if self.no_augment else AUGMENTS[self.data])
        return Job(model, task, recipe, {**kept, "model": specification})


@dataclass(kw_only=True)
class MaskedPatches(BackboneProgram):
    """Train a recurrent attention model to fill in hidden patches of images: Hyper-SET, or a baseline.

    implicit-attn train masked-images: embedded 8x8 digits, a minute or two. With --data mnist some ten
    minutes; --model transformer: about as many parameters. Pictures of several runs, beside guesses that
    learn nothing: examples/masked_images.py.

    A learned token stands for each hidden patch. The loss is the squared error of hidden pixels; its
    values at other numbers of iterations are printed.
    --preset paper takes shares, widths and optimiser from Hyper-SET (Hu, Zou, Xu,
    https://arxiv.org/abs/2502.11646), which predicts codes of a pretrained quantiser, not pixels.
    """

    data: Data = "digits"
    limit: int | None = None
    """use only so many training images"""
    test: int = 2000
    """test images, at most"""

    def folder(self) -> str:
        return f"masked-{self.data}-{self.model}"

    def job(self, first: bool) -> Job:
        data = load(self.data).first(self.limit)
        preset = MASKED_PAPER | ({"patch": 2} if self.data == "digits" else {})
        if self.preset == "small":
            preset = MASKED_SMALL | ({"width": WIDTHS[self.model]} if self.model in WIDTHS else {})
            if self.data == "digits":
                preset |= MASKED_DIGITS | DIGITS_OF.get(self.model, {})
        values = self.values_of(preset, SOLVES | {"iterations": 24})
        masked, patch = values.pop("masked"), values.pop("patch")
        task = MaskedImages(data, patch, masked=masked, test=self.test)
        kept = {"data": self.data, "masked": masked}
        kept |= {"limit": self.limit, "test": self.test, "rtol": values.get("rtol")}
        recipe = take_recipe(values, self.seed)
        _, channels, size, _ = data.train_images.shape
        around = {"kind": "masked-images", "image_size": size, "channels": channels, "patch": patch}
        around |= take(values, "positions")
        specification, model = self.build(around, values, "conditioned-input")
        if first:
            hidden = f"{task.most} of {task.patches} patches hidden"
            numbers = (
                f"{len(data.train_images)} training and {len(task.test_images()[0])} test images"
            )
            print(f"data: {data.name}, {numbers}, {hidden}")
        return Job(model, task, recipe, {**kept, "model": specification})


# In "paper" the dropout, the warm-up and the floor of the learning rate are ours: we found none published.
SUDOKU: dict[str, Values] = {
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
        preset = SUDOKU[self.preset]
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

"""Images: classified (``train vit-images``), or filled in where patches are hidden (``masked-images``).

Either way an image becomes tokens, one layer is applied to them repeatedly, or solved for its
equilibrium, and a linear readout gives the logits of the classes, or the pixels of the hidden patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from implicit_attn.data import Compose, RandomAffine, RandomCrop, RandomFlip, load
from implicit_attn.programs.backbones import SOLVED, SOLVES, BackboneProgram, Data, take
from implicit_attn.training import MaskedImages
from implicit_attn.training.script import Job, Values, take_recipe

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
        augment = None if self.no_augment else AUGMENTS[self.data]
        return Job(model, data, recipe, {**kept, "model": specification}, augment=augment)


@dataclass(kw_only=True)
class MaskedPatches(BackboneProgram):
    """Train a recurrent attention model to fill in hidden patches of images: Hyper-SET, or a baseline.

    implicit-attn train masked-images: embedded 8x8 digits, a minute or two. With --data mnist some ten
    minutes; --model transformer: about as many parameters. Pictures of several runs, beside guesses that
    learn nothing: examples/attention/masked_images.py.

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

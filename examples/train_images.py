"""Train Hyper-SET, an equilibrium block, coupled spins or a baseline to read images, or to fill in patches.

    python examples/train_images.py                                    # 8 x 8 digits, a minute or two
    python examples/train_images.py --model hyperset-equilibrium       # solved for its equilibrium
    python examples/train_images.py --model block                      # an equilibrium block
    python examples/train_images.py --data mnist --minutes 10          # and later the same with --resume
    python examples/train_images.py --data mnist --model spins         # 17 coupled vector spins
    python examples/train_images.py --task masked --model transformer  # fill in hidden patches
    python examples/train_images.py --data cifar10 --preset paper --compile    # for a GPU

--preset paper is the recipe of Hyper-SET (Hu, Zou, Xu, https://arxiv.org/abs/2502.11646). The rivals of the
block are --model encoder-layer, of about as many weights, and --model embedding, without a layer.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
import tyro
from image_tasks import Classification, MaskedImages
from options import Backbone, layer_options
from runner import STYLE, Table
from torch import Tensor, nn
from training import Training

from implicit_attn.data import ImageData, load
from implicit_attn.models import BACKBONES, ImageClassifier, build_model

Preset = dict[str, Any]
SMALL: Preset = {
    "dim": 64, "heads": 4, "patch": 7, "stem": "conv", "readout": "class", "initial_step": 0.1,
    "iterations": 12, "random_iterations": (6, 18), "epochs": 10, "batch": 128, "rate": 3e-3,
    "warmup": 0.1, "floor": 0.005, "weight_decay": 0.02,
}  # fmt: skip
PAPER: Preset = {
    "dim": 384, "heads": 6, "patch": 4, "stem": "patch", "readout": "class", "initial_step": 0.0,
    "iterations": 12, "epochs": 200, "batch": 128, "rate": 1e-3, "warmup": 5 / 200, "floor": 0.01,
    "weight_decay": 5e-5, "optimizer": "adam", "clip": math.inf,
}  # fmt: skip
CLASSIFY: dict[str, dict[str, Preset]] = {
    "small": {
        "digits": {"patch": 2, "epochs": 40, "batch": 64, "rate": 1.5e-3},
        "cifar10": {"patch": 4},
    },
    "paper": {"digits": {"patch": 2}},
}
MASKED: Preset = {
    "dim": 64, "heads": 4, "patch": 4, "initial_step": 0.1, "iterations": 8,
    "random_iterations": (4, 12), "epochs": 5, "batch": 128, "rate": 3e-3, "warmup": 0.1,
    "weight_decay": 0.02,
}  # fmt: skip
# At first a model predicts the mean image whatever it sees. Small batches and a high rate shorten this.
MASKED_DIGITS: Preset = {"patch": 2, "epochs": 60, "batch": 16, "rate": 4e-3}
# Hidden units with which masked models have about as many parameters.
WIDTHS = {"hyperset": 64, "hyperset-equilibrium": 772, "transformer": 288, "deq-transformer": 288,
          "energy-transformer": 707, "equilibrium": 286}  # fmt: skip
BLOCK: Preset = {
    "dim": 64, "heads": 4, "width": 128, "patch": 2, "stem": "patch", "readout": "tokens",
    "iterations": 60, "epochs": 20, "batch": 64, "rate": 4e-3,
}  # fmt: skip
SPINS: Preset = {
    "dim": 10, "iterations": 60, "rtol": 1e-4, "epochs": 10, "batch": 128, "rate": 4e-3, "floor": 0.002,
}  # fmt: skip
# The iterations of an equilibrium are the most evaluations of a solve, which seldom needs as many.
SOLVED: Preset = {"iterations": 50, "random_iterations": None, "rtol": 1e-3}
RIVALS, DROPOUT, BOUND = ("encoder-layer", "embedding"), 0.1, 0.9


@dataclass(kw_only=True)
class Images(Backbone):
    """What is trained, and how."""

    task: Literal["classify", "masked"] = "classify"
    data: Literal["digits", "mnist", "fashion-mnist", "cifar10"] = "digits"
    model: Literal[
        "hyperset", "hyperset-equilibrium", "equilibrium", "transformer", "deq-transformer",
        "energy-transformer", "spin-transformer", "block", "encoder-layer", "embedding", "spins",
    ] = "hyperset"  # fmt: skip
    limit: int | None = None
    """use only so many training images"""
    test: int | None = None
    """test images, at most (default: all, or 2000 with hidden patches)"""
    augment: bool = True
    """train on images that are shifted, turned or mirrored at random"""
    patch: int | None = None
    """height = width of a patch"""
    stem: Literal["patch", "conv"] | None = None
    """what embeds the patches"""
    readout: Literal["class", "mean", "tokens"] | None = None
    """a class token, or the mean or all of the tokens"""
    masked: float = 0.4
    """share of the patches that is hidden"""


class Rival(nn.Module):
    """A transformer encoder layer, or nothing, in the place of the equilibrium block."""

    def __init__(self, dim: int, heads: int, width: int, layers: int) -> None:
        super().__init__()
        self.dim, options = dim, dict[str, Any](batch_first=True, norm_first=True)
        make = partial(nn.TransformerEncoderLayer, dim, heads, width, DROPOUT, **options)
        self.layers = nn.Sequential(*(make() for _ in range(layers)))

    def forward(self, x: Tensor, *, iterations: int | None = None) -> Tensor:
        return self.layers(x)


def build(options: Images, data: ImageData) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and the settings of its weights."""
    torch.manual_seed(options.seed)
    _, channels, size, _ = data.train_images.shape
    shape: dict[str, Any] = {"image_size": size, "channels": channels}
    name, small = options.model, options.preset == "small"
    if options.task == "masked":
        if name not in BACKBONES:
            raise SystemExit(f"--model must be a backbone with --task masked, got {name}")
        digits = options.data == "digits"
        preset = MASKED | {"width": WIDTHS.get(name)} | (MASKED_DIGITS if digits else {})
        more = {"batch": 32, "rate": 2e-3} if digits else {}
        options.fill_for(name, preset, SOLVED | {"iterations": 24} | more)
        backbone, layer = options.specification(name, "conditioned-input")
        kind = {"kind": "masked-images", **shape, "patch": options.patch}
        if digits and name == "hyperset":
            kind["positions"] = "sinusoidal"
    elif name == "spins":
        options.fill(SPINS)
        layer = layer_options(options.rtol or 0.0, max_steps=options.iterations)
        kind = {"kind": "spin-classifier", "dim": options.dim, "bound": BOUND}
        settings = {"model": kind, "rtol": options.rtol, "max_steps": options.iterations}
        return build_model(kind, layer=layer), {"data": options.data, **settings}
    else:
        if name in ("block", *RIVALS):
            options.fill_for("equilibrium", BLOCK, {"rtol": 1e-3})
            more = {"positions": "learned", "embedding_norm": False}
        else:
            solved = SOLVED | ({"readout": "tokens"} if name == "hyperset-equilibrium" else {})
            chosen = CLASSIFY[options.preset].get(options.data, {})
            options.fill_for(name, (SMALL if small else PAPER) | chosen, solved)
            more = {}
        kind = {"kind": "image-classifier", **shape, "classes": data.classes}
        kind |= {"patch": options.patch, "stem": options.stem, "readout": options.readout, **more}
        known: Any = "equilibrium" if name in ("block", *RIVALS) else name
        backbone, layer = options.specification(known, "conditioned-state")
        if name == "block":
            backbone["dropout"] = DROPOUT
    settings = {"data": options.data, "rtol": options.rtol, "model": {**kind, "backbone": backbone}}
    settings |= {"limit": options.limit, "test": options.test, "masked": options.masked}
    if name in RIVALS:
        count = (options.layers or 1) if name == "encoder-layer" else 0
        rival = Rival(backbone["dim"], backbone["heads"], backbone["width"], count)
        kind = {key: value for key, value in kind.items() if key != "kind"}
        model: Any = ImageClassifier(rival, **kind)
        settings["model"] = name
    else:
        model = build_model(settings["model"], layer=layer)
    if name in ("block", *RIVALS):  # as large as embedded patches: a normed token tells where it is
        nn.init.normal_(model.position, std=0.5)
    return model, settings


def draw(path: Path, history: Table, measure: str, found: Table) -> None:
    """Loss and measure against epochs, and the measure against iterations at test time."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
        epochs = [row["epoch"] for row in history]
        axes[0].plot(epochs, [row["loss"] for row in history], "o-", markersize=3)
        axes[0].set(xlabel="epoch", ylabel="training loss", yscale="log")
        axes[1].plot(epochs, [row[measure] for row in history], "o-", color="C1", markersize=3)
        axes[1].set(xlabel="epoch", ylabel=measure.replace("_", " "))
        numbers = [row["iterations"] for row in found]
        axes[2].plot(numbers, [row[measure] for row in found], "o-", color="C2")
        axes[2].set(xlabel="iterations (evaluations) at test time")
        axes[2].set(ylabel=measure.replace("_", " "))
        figure.savefig(path)
        plt.close(figure)


def main(options: Images) -> list[dict[str, float]]:
    """Train, report, draw; the rows of the history."""
    data = load(options.data).first(options.limit)
    every = 2000 if options.task == "masked" else len(data.test_labels)
    test = options.test = options.test or every
    model, settings = build(options, data)
    task: Any = Classification(data, test, options.augment)
    measure, name = "test_accuracy", f"{options.data}-{options.model}"
    if options.task == "masked":
        task = MaskedImages(data, options.patch or 1, options.masked, test)
        measure, name = "test_psnr", f"masked-{name}"
    training = Training(options, model, task, settings, Path("runs") / name)
    images = f"{len(task.inputs)} + {len(task.tests[0])} images"
    training.fabric.print(f"{data.name}, {options.model}: {images}")
    if training.run():
        numbers = [max(1, round(times * (options.iterations or 1))) for times in (0.5, 1, 2, 4)]
        repeated = options.model not in ("spins", *RIVALS)
        found = training.report(numbers if repeated else [])
        if training.fabric.global_rank == 0:
            draw(training.folder / f"{name}.png", training.history, measure, found)
    return training.history


if __name__ == "__main__":
    main(tyro.cli(Images, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)))

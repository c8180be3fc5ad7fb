"""Train a recurrent attention model to classify images: Hyper-SET, or a baseline.

    implicit-attn train vit-images                               # embedded 8x8 digits, a minute or two
    implicit-attn train vit-images --data mnist                  # MNIST, a quarter of an hour
    implicit-attn train vit-images --data mnist --model transformer
    implicit-attn train vit-images --data mnist --attention softmax --layers 2
    implicit-attn train vit-images --data cifar10 --preset paper --compile    # for a GPU
    implicit-attn train vit-images --data mnist --resume         # go on where a run stopped

An image becomes tokens, a class token among them. One layer is applied to them repeatedly. A linear
readout of the class token gives the logits. With ``--model hyperset-equilibrium`` the layer is solved
for its equilibrium instead, and all tokens are read out. ``--model equilibrium`` solves equilibrium
blocks and ``--model spin-transformer`` steady states of spins: ``--layers`` of them one after the
other with weights of their own, each solved once. ``--preset paper`` is the recipe of Hyper-SET
(Hu, Zou, Xu, https://arxiv.org/abs/2502.11646); ``--preset small`` is what two cores can train.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import solvers
from implicit_attn.checkpoint.files import RunLock
from implicit_attn.command_line import (
    Parser,
    amount,
    command,
    count,
    learning_rate,
    mistakes,
    refuse_huge,
)
from implicit_attn.data import (
    LOADERS,
    Compose,
    ImageData,
    RandomAffine,
    RandomCrop,
    RandomFlip,
    load,
)
from implicit_attn.models import BACKBONES, build_backbone, build_model
from implicit_attn.models.image_classifier import POSITIONS, READOUTS
from implicit_attn.models.registry import BLOCKS, CHOICES, EQUILIBRIUM, SOLVED, SPINS
from implicit_attn.training import Training, accuracy, run_script
from implicit_attn.training.options import (
    add_model_options,
    add_process_options,
    add_result_options,
    add_training_options,
    backbone_specification,
    complete,
    given,
    layer_options,
    settings,
)
from implicit_attn.training.script import build_training, claim, save_weights, start

# Defaults of the options: two presets for every data set.
PAPER = {
    "dim": 384, "heads": 6, "patch": 4, "stem": "patch", "readout": "class",
    "initial_step": 0.0, "iterations": 12, "epochs": 200, "batch": 128, "rate": 1e-3, "warmup": 5 / 200,
    "floor": 0.01, "weight_decay": 5e-5, "optimizer": "adam", "clip": None,
}  # fmt: skip
SMALL = {
    "dim": 64, "heads": 4, "patch": 7, "stem": "conv", "readout": "class",
    "initial_step": 0.1, "iterations": 12, "random_iterations": [6, 18], "epochs": 10, "batch": 128,
    "rate": 3e-3, "warmup": 0.1, "floor": 0.005, "weight_decay": 0.02, "optimizer": "adamw", "clip": 1.0,
}  # fmt: skip
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "small": {
        "digits": SMALL | {"patch": 2, "epochs": 40, "batch": 64, "rate": 1.5e-3},
        "mnist": SMALL,
        "fashion-mnist": SMALL,
        "cifar10": SMALL | {"patch": 4},
    },
    "paper": {
        "digits": PAPER | {"patch": 2},
        "mnist": PAPER,
        "fashion-mnist": PAPER,
        "cifar10": PAPER,
    },
}
# The iterations of an equilibrium are the most evaluations of a solve, which seldom needs as many.
SOLVES: dict[str, Any] = {"iterations": 50, "random_iterations": None, "rtol": 1e-3}
EQUILIBRIA: dict[str, dict[str, Any]] = {
    # At the minimum of its energy a class token has gathered little of the image: all are read out.
    EQUILIBRIUM: SOLVES | {"readout": "tokens"},
    BLOCKS: SOLVES,
    SPINS: SOLVES,
}
AUGMENTS: dict[str, Any] = {
    "digits": None,  # 8x8 pixels are too few for rotations and shifts
    "mnist": RandomAffine(),
    "fashion-mnist": Compose(RandomCrop(2), RandomFlip()),
    "cifar10": Compose(RandomCrop(4), RandomFlip()),
}


def command_line() -> Parser:
    parser = Parser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--data", choices=sorted(LOADERS), default="digits")
    add_model_options(
        parser, presets=PRESETS, backbones=BACKBONES, choices=CHOICES, token="token", random="6 18"
    )
    add("--patch", type=count, help="height = width of a patch in pixels")
    add("--stem", choices=("patch", "conv"), help="how patches become tokens")
    add("--readout", choices=READOUTS, help="the tokens that are read out")
    add("--positions", choices=POSITIONS, help="of the tokens (default: sinusoidal)")
    add("--pixel-norm", action="store_true", default=None, help="LayerNorm of a patch's pixels")
    add("--rtol", type=amount, help="tolerance of an equilibrium in training (default 1e-3)")
    add("--epochs", type=count)
    add_training_options(parser)
    add("--weight-decay", type=learning_rate)
    add("--optimizer", choices=("adam", "adamw"))
    add("--no-augment", action="store_true", help="train on the images as they are")
    add("--limit", type=count, help="use only so many training images")
    add_process_options(parser, save_every=None)
    add_result_options(parser, "folder of the results (default runs/DATA-MODEL)")
    return parser


def arguments(
    words: Sequence[str] | None = None, parser: Parser | None = None
) -> argparse.Namespace:
    parser = parser or command_line()
    options = parser.parse_args(words)
    if options.rtol is not None and options.model not in SOLVED:
        parser.error(f"--rtol is for {' and '.join(SOLVED)}, got --model {options.model}")
    preset = PRESETS[options.preset][options.data]
    complete(parser, options, preset, build=build_backbone, equilibria=EQUILIBRIA)
    options.out = options.out or Path("runs") / f"{options.data}-{options.model}"
    return options


def specification(options: argparse.Namespace, data: ImageData) -> dict[str, Any]:
    """From which ``build_model`` builds the model, and ``load_model`` builds it again."""
    _, channels, size, _ = data.train_images.shape
    shape = {"image_size": size, "channels": channels, "classes": data.classes}
    stem = {"patch": options.patch, "stem": options.stem, "readout": options.readout}
    backbone = backbone_specification(options, step_size="conditioned-state")
    stem |= given(options, "positions", "pixel_norm")
    return {"kind": "image-classifier", **shape, **stem, "backbone": backbone}


def build(options: argparse.Namespace, data: ImageData) -> nn.Module:
    torch.manual_seed(options.seed)
    layer = None
    if options.model in SOLVED:
        layer = layer_options(options, tolerance=solvers.Tolerance, adjoint=solvers.Implicit)
    return build_model(specification(options, data), layer=layer)


def report(training: Training, options: argparse.Namespace, data: ImageData) -> None:
    """The weights alone, and the accuracy at other numbers of iterations than in training."""
    save_weights(training)
    model, history = training.model, training.history
    number = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"\n{data.name}, {options.model}, {number} parameters: test accuracy "
        f"{100 * history[-1]['test_accuracy']:.2f} %\n{training.summary()}"
    )
    images, labels = training.data.some_test(2000)
    trained = options.iterations
    print(f"accuracy on {len(images)} test images by iterations:")
    for iterations in sorted({max(1, trained // 2), trained, 2 * trained}):
        right = accuracy(model, images, labels, iterations=iterations)
        print(f"  {iterations:3d}  {100 * right:.2f} %")
    print(f"tables, checkpoint and weights: {options.out}")


def main(words: Sequence[str] | None = None) -> None:
    parser = command_line()
    with command(parser):
        run(arguments(words, parser))


def run(options: argparse.Namespace) -> None:
    with mistakes():
        fabric = start(options)
    with claim(options, fabric) as lock:
        train(options, fabric, lock)


def train(options: argparse.Namespace, fabric: Any, lock: RunLock) -> None:
    first = fabric.global_rank == 0
    with mistakes("--data", first=first):
        data = load(options.data).first(options.limit)
    with mistakes(first=first):
        refuse_huge(lambda: build(options, data))
    if first:
        numbers = f"{len(data.train_images)} training and {len(data.test_images)} test images"
        print(f"data: {data.name}, {numbers}")
    with mistakes(first=first):
        training = build_training(
            options,
            build(options, data),
            data,
            # What is given of these stands in the specification of the model.
            {**settings(options, "positions", "pixel_norm"), "model": specification(options, data)},
            fabric=fabric,
            augment=None if options.no_augment else AUGMENTS[options.data],
        )
    run_script(training, resume=options.resume, overwrite=options.overwrite, lock=lock)
    if first:
        report(training, options, data)


if __name__ == "__main__":
    main()

"""Train a recurrent attention model to fill in hidden patches of images: Hyper-SET, or a baseline.

    implicit-attn train masked-images                           # embedded 8x8 digits, a minute or two
    implicit-attn train masked-images --model transformer       # about as many parameters
    implicit-attn train masked-images --model hyperset-equilibrium
    implicit-attn train masked-images --data mnist              # MNIST, some ten minutes
    implicit-attn train masked-images --data mnist --resume     # go on where a run stopped
    implicit-attn train masked-images --compare runs/masked-digits-*

Images become patches and patches tokens. A learned token stands for each hidden patch. One layer is
applied to the tokens repeatedly, or solved for its equilibrium. A linear readout gives the pixels. The
loss is the squared error of hidden pixels. At the end stand the error by the number of iterations, that
of fillings which learn nothing, and pictures in ``--out``. ``--compare`` draws and tabulates earlier
runs, and trains nothing. ``--preset paper`` takes shares, widths and optimiser from Hyper-SET (Hu, Zou,
Xu, https://arxiv.org/abs/2502.11646), which predicts codes of a pretrained quantiser, not pixels.
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
    place,
    refuse_huge,
    share,
)
from implicit_attn.data import LOADERS, ImageData, load
from implicit_attn.models import BACKBONES, build_backbone, build_model
from implicit_attn.models.masked.masked_images import POSITIONS
from implicit_attn.models.registry import CHOICES, SOLVED
from implicit_attn.studies.masked.reconstruction import compare_runs, report_run
from implicit_attn.training import MaskedImages, run_script
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

# Defaults of the options. The paper's batch, rates and clipping are those of its code for 256 codes.
PAPER = {
    "dim": 768, "heads": 12, "patch": 4, "initial_step": 0.0, "iterations": 12, "epochs": 300,
    "batch": 64, "rate": 1e-4, "warmup": 0.0, "floor": 1.0, "weight_decay": 0.1, "clip": 3.0,
    "betas": [0.9, 0.96], "masked": 0.4,
}  # fmt: skip
SMALL = {
    "dim": 64, "heads": 4, "patch": 4, "initial_step": 0.1, "iterations": 8,
    "random_iterations": [4, 12], "epochs": 5, "batch": 128, "rate": 3e-3, "warmup": 0.1,
    "floor": 0.01, "weight_decay": 0.02, "clip": 1.0, "betas": [0.9, 0.999], "masked": 0.4,
}  # fmt: skip
# At first a model predicts the mean image whatever it sees. Small batches and a high rate shorten this.
DIGITS = {"patch": 2, "epochs": 60, "batch": 16, "rate": 4e-3}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "small": {
        "digits": SMALL | DIGITS,
        "mnist": SMALL,
        "fashion-mnist": SMALL,
        "cifar10": SMALL,
    },
    "paper": {name: PAPER | ({"patch": 2} if name == "digits" else {}) for name in LOADERS},
}
# Hidden units with which the models of the preset "small" have about as many parameters.
WIDTHS = {"hyperset": 64, "hyperset-equilibrium": 772, "transformer": 288, "energy-transformer": 707,
          "equilibrium": 286}  # fmt: skip
# The iterations of an equilibrium are the most evaluations of a solve, which seldom needs as many.
EQUILIBRIA = {name: {"iterations": 24, "random_iterations": None, "rtol": 1e-3} for name in SOLVED}

# On the digits; the transformer does worse with the sines and cosines than with learned positions, and a
# solve of a small batch costs as much as one of a large batch.
DIGITS_OF: dict[str, dict[str, Any]] = {
    "hyperset": {"positions": "sinusoidal"},
    **{name: {"batch": 32, "rate": 2e-3} for name in SOLVED},
}


def command_line() -> Parser:
    parser = Parser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--data", choices=sorted(LOADERS), default="digits")
    add_model_options(
        parser, presets=PRESETS, backbones=BACKBONES, choices=CHOICES, token="patch", random="4 12"
    )
    add("--patch", type=count, help="height = width of a patch in pixels")
    text = "of the patches (default: learned; Hyper-SET on digits: sinusoidal)"
    add("--positions", choices=POSITIONS, help=text)
    add("--masked", type=share, help="largest share of hidden patches, that of the test (0.4)")
    add("--constant-share", action="store_true", help="hide the largest share in training, too")
    add("--normalise", action="store_true", help="predict pixels standardised within each patch")
    add("--rtol", type=amount, help="tolerance of an equilibrium in training (default 1e-3)")
    add("--epochs", type=count)
    add_training_options(parser)
    add("--weight-decay", type=learning_rate)
    add("--limit", type=count, help="use only so many training images")
    add("--test", type=count, default=2000, help="test images, at most")
    add_process_options(parser, save_every=None)
    add_result_options(parser, "folder of the results (default runs/masked-DATA-MODEL)")
    text = "folders of earlier runs to draw and tabulate; trains nothing"
    add("--compare", type=place, nargs="+", metavar="RUN", help=text)
    return parser


def arguments(
    words: Sequence[str] | None = None, parser: Parser | None = None
) -> argparse.Namespace:
    parser = parser or command_line()
    options = parser.parse_args(words)
    if options.compare is not None:
        options.out = options.out or Path("runs")
        return options
    if options.rtol is not None and options.model not in SOLVED:
        parser.error(f"--rtol is for {' and '.join(SOLVED)}, got --model {options.model}")
    preset = PRESETS[options.preset][options.data]
    if options.preset == "small" and options.model in WIDTHS:
        preset = preset | {"width": WIDTHS[options.model]}
    if options.preset == "small" and options.data == "digits":
        preset = preset | DIGITS_OF.get(options.model, {})
    complete(parser, options, preset, build=build_backbone, equilibria=EQUILIBRIA)
    options.out = options.out or Path("runs") / f"masked-{options.data}-{options.model}"
    return options


def specification(options: argparse.Namespace, data: ImageData) -> dict[str, Any]:
    """From which ``build_model`` builds the model, and ``load_model`` builds it again."""
    _, channels, size, _ = data.train_images.shape
    shape = {"image_size": size, "channels": channels, "patch": options.patch}
    backbone = backbone_specification(options, step_size="conditioned-input")
    return {"kind": "masked-images", **shape, **given(options, "positions"), "backbone": backbone}


def build(options: argparse.Namespace, data: ImageData) -> nn.Module:
    torch.manual_seed(options.seed)
    layer = None
    if options.model in SOLVED:
        layer = layer_options(options, tolerance=solvers.Tolerance, adjoint=solvers.Implicit)
    return build_model(specification(options, data), layer=layer)


def main(words: Sequence[str] | None = None) -> None:
    parser = command_line()
    with command(parser):
        options = arguments(words, parser)
        if options.compare is None:
            run(options)
        else:
            with mistakes("--compare"):
                compare_runs(options.compare, options.out)


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
        task = MaskedImages(
            data, options.patch, masked=options.masked, vary=not options.constant_share,
            normalise=options.normalise, test=options.test,
        )  # fmt: skip
    if first:
        hidden = f"{task.most} of {task.patches} patches hidden"
        numbers = f"{len(data.train_images)} training and {len(task.test_images()[0])} test images"
        print(f"data: {data.name}, {numbers}, {hidden}")
    with mistakes(first=first):
        training = build_training(
            options,
            build(options, data),
            task,
            {**settings(options, "positions", "compare"), "model": specification(options, data)},
            fabric=fabric,
        )
    run_script(training, resume=options.resume, overwrite=options.overwrite, lock=lock)
    if first:
        report(training, options)


def report(training: Any, options: argparse.Namespace) -> None:
    """The weights alone, tables and pictures."""
    save_weights(training)
    print(f"\n{training.summary()}")
    numbers = {"iterations": options.iterations, "seed": options.seed}
    report_run(training.model, training.task, name=options.model, **numbers, out=options.out)
    print(f"tables, pictures, checkpoint and weights: {options.out}")


if __name__ == "__main__":
    main()

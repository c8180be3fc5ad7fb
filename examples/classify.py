"""Train an energy-defined equilibrium layer to read handwritten digits, and report on it.

    python examples/classify.py                          # embedded 8x8 digits, about a minute
    python examples/classify.py --data mnist --patch 4   # MNIST, local or downloaded
    python examples/classify.py --resume                 # go on where an interrupted run stopped
    python examples/classify.py --overwrite              # train anew in the folder of an earlier run

Each image becomes tokens x; the layer returns the tokens z* that minimise
``a E_attention(z) + b E_memory(z) + 1/2 |z - x|^2``; a linear readout classifies z*.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

import solvers
from implicit_attn.checkpoint.files import RunLock
from implicit_attn.command_line import (
    Parser,
    command,
    count,
    mistakes,
    number,
    positive,
    refuse_huge,
    size,
    whole,
)
from implicit_attn.data import LOADERS, ImageData, load
from implicit_attn.models import PatchClassifier
from implicit_attn.studies import write_report
from implicit_attn.training import Training, run_script
from implicit_attn.training.options import (
    add_result_options,
    add_solver_options,
    add_training_options,
    build_recipe,
    layer_options,
    settings,
)
from implicit_attn.training.script import checkpoint_path, claim


def command_line() -> Parser:
    parser = Parser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--data", choices=sorted(LOADERS), default="digits")
    add(
        "--readout",
        choices=("tokens", "class"),
        default="tokens",
        help="all tokens or a class token",
    )
    add(
        "--stem",
        choices=("patch", "conv"),
        help="how patches become tokens (default: patch, and conv for the class token)",
    )
    add("--patch", type=count, default=2, help="height = width of a patch")
    add("--dim", type=size, default=64, help="features of a token")
    add("--heads", type=size, default=4)
    add("--memories", type=size, default=128, help="rows of the feed-forward energy")
    add(
        "--bound", type=positive, default=2.0, help="bound on the spectral norms of the projections"
    )
    add(
        "--maximum",
        type=number(0.5, above=True),
        default=2.0,
        help="bound on the weights of the energies",
    )
    add("--epochs", type=count, help="default: 16, and 20 for the class token")
    add_training_options(parser, batch=64, rate=2e-3)
    add_solver_options(parser, rtol=1e-3)
    add("--limit", type=whole(0), default=0, help="use only so many training images (0: all)")
    add_result_options(parser, "folder of the report (default runs/DATA-READOUT)")
    return parser


def complete(options: argparse.Namespace) -> argparse.Namespace:
    """Give defaults to the options that depend on others."""
    if options.epochs is None:
        options.epochs = 20 if options.readout == "class" else 16
    options.stem = options.stem or ("conv" if options.readout == "class" else "patch")
    options.out = options.out or Path("runs") / f"{options.data}-{options.readout}"
    return options


def build(options: argparse.Namespace, data: ImageData) -> PatchClassifier:
    torch.manual_seed(options.seed)
    _, channels, side, _ = data.train_images.shape
    return PatchClassifier(
        side,
        channels,
        data.classes,
        patch=options.patch,
        stem=options.stem,
        bound=options.bound,
        maximum=options.maximum,
        dim=options.dim,
        heads=options.heads,
        memories=options.memories,
        readout=options.readout,
        layer=layer_options(options, tolerance=solvers.Tolerance, adjoint=solvers.Implicit),
    )


def report(training: Training, options: argparse.Namespace) -> None:
    """Tables as CSV and text, one picture."""
    history = training.history
    number = sum(p.numel() for p in training.model.parameters())
    title = (
        f"{options.data}, {options.readout} readout: test accuracy "
        f"{100 * history[-1]['test_accuracy']:.2f} %, {number} parameters"
    )
    print(f"\n{title}")
    print(write_report(training.model, training.data, history, options.out, title, options.rtol))
    print(f"\n{training.summary()}")
    print(f"report: {options.out / 'report.png'} (tables beside it as CSV)")


def train(options: argparse.Namespace, lock: RunLock) -> None:
    with mistakes("--data"):
        data = load(options.data).first(options.limit or None)
    with mistakes():
        refuse_huge(lambda: build(options, data))
        training = Training(
            build(options, data),
            data,
            build_recipe(options),
            checkpoint_path(options),
            settings(options),
        )
    run_script(training, resume=options.resume, overwrite=options.overwrite, lock=lock)
    report(training, options)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line()
    with command(parser):
        options = complete(parser.parse_args(arguments))
        with claim(options) as lock:
            train(options, lock)


if __name__ == "__main__":
    main()

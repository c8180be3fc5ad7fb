"""Train an equilibrium block to read handwritten digits, beside simpler models, and report on it.

    implicit-attn train classify                          # embedded 8x8 digits, about a minute
    implicit-attn train classify --data mnist --patch 4   # MNIST, local or downloaded
    implicit-attn train classify --model hyperset         # an energy that sees the image as 1/2 |z - x|^2
    implicit-attn train classify --baselines none         # the equilibrium alone
    implicit-attn train classify --resume                 # go on where an interrupted run stopped
    implicit-attn train classify --overwrite              # train anew in the folder of an earlier run

Each image becomes tokens x. The block makes x + z* of them, where z* minimises an energy that sees x
inside its attention and its hidden units; a linear readout classifies the result. The same loop trains
the same classifier with nothing in the place of the block and with a transformer encoder layer of equal
size; logistic regression on the pixels stands beside them.
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
    command,
    count,
    mistakes,
    number,
    positive,
    refuse_huge,
    share,
    size,
    whole,
)
from implicit_attn.data import LOADERS, ImageData, load
from implicit_attn.models import PatchClassifier, build_model
from implicit_attn.studies import write_report
from implicit_attn.studies.comparison.report import write_comparison
from implicit_attn.studies.comparison.rivals import ENCODER, build_rival, train_rivals
from implicit_attn.training import Training, accuracy, run_script
from implicit_attn.training.options import (
    add_result_options,
    add_solver_options,
    add_training_options,
    build_recipe,
    layer_options,
    settings,
)
from implicit_attn.training.script import checkpoint_path, claim

# Defaults of the options that depend on the model.
MODELS: dict[str, dict[str, Any]] = {
    "equilibrium": {"rate": 4e-3, "dropout": 0.1, "layers": 1},
    "hyperset": {"rate": 2e-3, "bound": 2.0, "maximum": 2.0},
}
EMBEDDING = {"positions": "learned", "embedding_norm": False}
POSITIONS = 0.5  # standard deviation of their initial values
ONLY = {
    "dropout": "equilibrium",
    "layers": "equilibrium",
    "bound": "hyperset",
    "maximum": "hyperset",
}


def command_line() -> Parser:
    parser = Parser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--data", choices=sorted(LOADERS), default="digits")
    add("--model", choices=sorted(MODELS), default="equilibrium")
    text = "all tokens, a class token or (equilibrium) the mean of all tokens"
    add("--readout", choices=("tokens", "class", "mean"), default="tokens", help=text)
    text = "how patches become tokens (default: patch, and conv for the class token)"
    add("--stem", choices=("patch", "conv"), help=text)
    add("--patch", type=count, default=2, help="height = width of a patch")
    add("--dim", type=size, default=64, help="features of a token")
    add("--heads", type=size, default=4)
    add("--memories", type=size, default=128, help="hidden units of the feed-forward energy")
    add("--layers", type=whole(1, 100), help="equilibrium blocks (default 1)")
    add("--dropout", type=share, help="of the blocks and of the encoder layer (default 0.1)")
    add("--bound", type=positive, help="hyperset: of the projections' spectral norms (default 2)")
    text = "hyperset: bound on the weights of the energies (default 2)"
    add("--maximum", type=number(0.5, above=True), help=text)
    add("--epochs", type=count, help="default: 20; hyperset with all tokens: 16")
    add_training_options(parser, batch=64)
    add_solver_options(parser, rtol=1e-3)
    add("--limit", type=whole(0), default=0, help="use only so many training images (0: all)")
    text = "simpler models trained beside it: all of them or none"
    add("--baselines", choices=("all", "none"), default="all", help=text)
    add_result_options(parser, "folder of the report (default runs/DATA-READOUT)")
    return parser


def complete(parser: Parser, options: argparse.Namespace) -> argparse.Namespace:
    """Give defaults to the options that depend on others, refuse those that would be ignored."""
    for name, model in ONLY.items():
        if getattr(options, name) is not None and options.model != model:
            parser.error(f"--{name} is for --model {model}, got --model {options.model}")
    for name, value in MODELS[options.model].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.epochs is None:
        tokens = options.model == "hyperset" and options.readout == "tokens"
        options.epochs = 16 if tokens else 20
    options.stem = options.stem or ("conv" if options.readout == "class" else "patch")
    options.out = options.out or Path("runs") / f"{options.data}-{options.readout}"
    return options


def classifier(options: argparse.Namespace, data: ImageData) -> dict[str, Any]:
    """What is around the block: images to tokens, and tokens to logits."""
    _, channels, side, _ = data.train_images.shape
    shape = {"image_size": side, "channels": channels, "classes": data.classes}
    return shape | {"patch": options.patch, "stem": options.stem, "readout": options.readout}


def specification(options: argparse.Namespace, data: ImageData) -> dict[str, Any]:
    """From which ``build_model`` builds the equilibrium, and ``load_model`` builds it again."""
    names = ("dim", "heads", "layers", "dropout")
    backbone = {"name": "equilibrium", **{name: getattr(options, name) for name in names}}
    backbone |= {"width": options.memories, "iterations": options.max_steps}
    around = {**classifier(options, data), **EMBEDDING}
    return {"kind": "image-classifier", **around, "backbone": backbone}


def spread_positions(model: Any) -> nn.Module:
    """Positions of the size of the embedded patches: a normed token then tells where it is."""
    nn.init.normal_(model.position, std=POSITIONS)
    return model


def build(options: argparse.Namespace, data: ImageData) -> nn.Module:
    torch.manual_seed(options.seed)
    layer = layer_options(options, tolerance=solvers.Tolerance, adjoint=solvers.Implicit)
    if options.model == "equilibrium":
        return spread_positions(build_model(specification(options, data), layer=layer))
    names = ("dim", "heads", "memories", "bound", "maximum")
    own = {name: getattr(options, name) for name in names}
    return PatchClassifier(**classifier(options, data), **own, layer=layer)


def build_baseline(name: str, options: argparse.Namespace, data: ImageData) -> nn.Module:
    torch.manual_seed(options.seed)
    backbone = {"dim": options.dim, "heads": options.heads, "hidden": options.memories}
    if options.model == "equilibrium":
        backbone |= {"layers": options.layers, "dropout": options.dropout}
    return spread_positions(build_rival(name, backbone, {**classifier(options, data), **EMBEDDING}))


def kept(options: argparse.Namespace, data: ImageData) -> dict[str, Any]:
    """The settings that a resumed run must have, of the equilibrium and of the baselines alike."""
    found = settings(options, "baselines")
    if options.model == "equilibrium":
        found["model"] = specification(options, data)
    return found


def train_baselines(
    options: argparse.Namespace, data: ImageData, lock: RunLock
) -> dict[str, tuple[nn.Module, float]]:
    """Each to its end, from its checkpoint if there is one: what was interrupted goes on there."""

    def run(training: Training) -> None:
        run_script(training, resume=training.path.exists(), lock=lock)

    def new(name: str) -> nn.Module:
        return build_baseline(name, options, data)

    recipe, wanted = build_recipe(options), kept(options, data)
    return train_rivals(new, data, recipe, options.out, wanted, run)


def report(training: Training, options: argparse.Namespace, lock: RunLock) -> None:
    """Tables as CSV and text, a picture of the equilibrium, and one of it beside the baselines."""
    history, model, data = training.history, training.model, training.data
    rivals = {} if options.baselines == "none" else train_baselines(options, data, lock)
    explicit = None
    if rivals:
        right = accuracy(rivals[ENCODER][0], data.test_images, data.test_labels)
        explicit = (ENCODER, right)
    parameters = sum(p.numel() for p in model.parameters())
    title = (
        f"{options.data}, {options.model}, {options.readout} readout: test accuracy "
        f"{100 * history[-1]['test_accuracy']:.2f} %, {parameters:,} parameters"
    )
    print(f"\n{title}")
    text = write_report(model, data, history, options.out, title, options.rtol, explicit=explicit)
    print(text)
    print(f"\n{training.summary()}")
    print(f"report: {options.out / 'report.png'} (tables beside it as CSV)")
    if rivals:
        seconds = sum(row["seconds"] for row in history)
        print(write_comparison(model, options.model, rivals, data, options.out, title, seconds))
        print(f"comparison: {options.out / 'comparison.png'}")


def train(options: argparse.Namespace, lock: RunLock) -> None:
    with mistakes("--data"):
        data = load(options.data).first(options.limit or None)
    with mistakes():
        refuse_huge(lambda: build(options, data))
        if options.baselines != "none":
            refuse_huge(lambda: build_baseline(ENCODER, options, data))
        training = Training(
            build(options, data),
            data,
            build_recipe(options),
            checkpoint_path(options),
            kept(options, data),
        )
    run_script(training, resume=options.resume, overwrite=options.overwrite, lock=lock)
    report(training, options, lock)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line()
    with command(parser):
        options = complete(parser, parser.parse_args(arguments))
        with claim(options) as lock:
            train(options, lock)


if __name__ == "__main__":
    main()

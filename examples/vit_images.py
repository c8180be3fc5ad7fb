"""Train a recurrent attention model to classify images: Hyper-SET, or one of its rivals.

    python examples/vit_images.py                               # embedded 8x8 digits, a minute or two
    python examples/vit_images.py --data mnist                  # MNIST, a quarter of an hour
    python examples/vit_images.py --data mnist --model transformer
    python examples/vit_images.py --data mnist --attention softmax --layers 2
    python examples/vit_images.py --data cifar10 --preset paper --compile    # for a GPU
    python examples/vit_images.py --data mnist --resume         # go on where a run stopped

An image becomes tokens, a class token among them; one layer is applied to them again and again; a
linear readout of the class token names the class (``--model hyperset-equilibrium``: one layer is
solved for its equilibrium, and all tokens are read out). ``--preset paper`` is the recipe of Hyper-SET
(Hu, Zou, Xu, arXiv 2502.11646); ``--preset small`` is what two cores can train.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

import solvers
from implicit_attn.checkpoint import save_checkpoint
from implicit_attn.data import (
    LOADERS,
    Compose,
    ImageData,
    RandomAffine,
    RandomCrop,
    RandomFlip,
    load,
)
from implicit_attn.energies.hyperset_energy import ATTENTIONS, FEEDFORWARDS
from implicit_attn.models import BACKBONES, build_model
from implicit_attn.models.backbones import build_backbone
from implicit_attn.models.image_classifier import POSITIONS, READOUTS
from implicit_attn.models.recurrent import ORDERS
from implicit_attn.training import (
    ACCELERATORS,
    PRECISIONS,
    CsvLog,
    Recipe,
    TensorBoardLog,
    Training,
    accuracy,
    run_script,
    start_processes,
)
from implicit_attn.training.options import (
    VARIANTS,
    add_variants,
    amount,
    check_model_options,
    count,
    fill_in,
    given,
)
from implicit_attn.updates.step_sizes import STEP_SIZES

# What an option is where the command line does not say; a pair of presets for every data set.
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
# An equilibrium is solved for: its iterations are evaluations at most, and seldom needed. What a class
# token gathers at the minimum of an energy is little: all tokens are read out.
SOLVED = {"iterations": 50, "random_iterations": None, "readout": "tokens", "rtol": 1e-3}
AUGMENTS: dict[str, Any] = {
    "digits": None,  # they are too small to be turned and moved by parts of a pixel
    "mnist": RandomAffine(),
    "fashion-mnist": Compose(RandomCrop(2), RandomFlip()),
    "cifar10": Compose(RandomCrop(4), RandomFlip()),
}
# How a run is carried out, not what it computes: may change when it is resumed.
RUNNING = ("out", "resume", "devices", "accelerator", "save_every", "log_every", "tensorboard")
SPECIFIED = ("positions", *VARIANTS)  # kept in the specification of the model, where they are given


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--data", choices=sorted(LOADERS), default="digits")
    add("--preset", choices=sorted(PRESETS), default="small", help="defaults of what follows")
    add("--model", choices=sorted(BACKBONES), default="hyperset")
    add("--dim", type=count, help="features of a token")
    add("--heads", type=count)
    add("--width", type=count, help="of the feed-forward part (default: the model's own)")
    add("--patch", type=count, help="height = width of a patch in pixels")
    add("--stem", choices=("patch", "conv"), help="how patches become tokens")
    add("--readout", choices=READOUTS, help="the tokens that are read out")
    add("--positions", choices=POSITIONS, help="of the tokens (default: sinusoidal)")
    add("--initial-step", type=float, help="step sizes of Hyper-SET at the start")
    add("--iterations", type=count, help="of the layer, in each batch the same number")
    add(
        "--random-iterations", type=count, nargs=2, metavar=("LEAST", "MOST"),
        help="train each batch with a random number of iterations (preset small: 6 18)",
    )  # fmt: skip
    add("--rtol", type=float, help="tolerance of an equilibrium in training (default 1e-3)")
    add("--epochs", type=count)
    add("--batch", type=count, help="images at once, of all processes")
    add("--rate", type=amount, help="peak learning rate (warm-up, cosine decay)")
    add("--weight-decay", type=amount)
    add("--optimizer", choices=("adam", "adamw"))
    add("--no-augment", action="store_true", help="train on the images as they are")
    add("--seed", type=int, default=0)
    add("--limit", type=count, help="use only so many training images")
    add("--devices", type=count, default=1, help="processes, one per card or sharing the CPU")
    add("--accelerator", choices=ACCELERATORS, default="auto")
    add("--precision", choices=PRECISIONS, default="32-true")
    add("--compile", action="store_true", help="compile the repeated layer (a minute at the start)")
    add("--save-every", type=count, help="a checkpoint every so many steps, besides every epoch")
    add("--log-every", type=count, default=10, help="a row in steps.csv every so many steps")
    add("--tensorboard", action="store_true", help="write events for TensorBoard, too")
    add("--out", type=Path, help="folder of the results (default runs/DATA-MODEL)")
    add("--resume", action="store_true", help="continue from the checkpoint in that folder")
    kinds: dict[str, Any] = {"attention": ATTENTIONS, "feedforward": FEEDFORWARDS}
    add_variants(parser, **kinds, step_size=STEP_SIZES, order=ORDERS)
    return parser


def arguments() -> argparse.Namespace:
    parser = command_line()
    options = parser.parse_args()
    check_model_options(parser, options, build_backbone)
    preset = PRESETS[options.preset][options.data]
    if options.model == "hyperset-equilibrium":
        preset = preset | SOLVED
    elif options.rtol is not None:
        parser.error(f"--rtol is for hyperset-equilibrium, got --model {options.model}")
    if options.iterations is not None:  # asked for: no random numbers unless these are, too
        preset = {name: value for name, value in preset.items() if name != "random_iterations"}
    fill_in(options, preset)
    options.out = options.out or Path("runs") / f"{options.data}-{options.model}"
    return options


def specification(options: argparse.Namespace, data: ImageData) -> dict[str, Any]:
    """From which ``build_model`` builds the model, and ``load_model`` builds it again."""
    backbone = {"name": options.model, "dim": options.dim, "heads": options.heads}
    backbone |= {"width": options.width, "iterations": options.iterations}
    if options.model == "hyperset":
        backbone |= {"step_size": "conditioned-state", "initial_step": options.initial_step}
    backbone |= given(options, *VARIANTS)
    _, channels, size, _ = data.train_images.shape
    shape = {"image_size": size, "channels": channels, "classes": data.classes}
    stem = {"patch": options.patch, "stem": options.stem, "readout": options.readout}
    stem |= given(options, "positions")
    return {"kind": "image-classifier", **shape, **stem, "backbone": backbone}


def build(options: argparse.Namespace, data: ImageData) -> nn.Module:
    torch.manual_seed(options.seed)
    layer = None
    if options.model == "hyperset-equilibrium":
        # Failures are counted and shown with the loss instead of warned about.
        layer = {"on_failure": "ignore", "adjoint": solvers.Implicit(on_failure="ignore")}
        layer |= {"tolerance": solvers.Tolerance(rtol=options.rtol)}
    return build_model(specification(options, data), layer=layer)


def recipe(options: argparse.Namespace) -> Recipe:
    names = ("epochs", "batch", "rate", "warmup", "floor", "weight_decay", "clip", "seed")
    chosen = {name: getattr(options, name) for name in names}
    random = options.random_iterations
    return Recipe(
        **chosen, optimizer=options.optimizer, iterations=tuple(random) if random else None
    )


def report(training: Training, options: argparse.Namespace, data: ImageData) -> None:
    """The weights alone, and the accuracy at other numbers of iterations than in training."""
    model, history = training.model, training.history
    number = sum(parameter.numel() for parameter in model.parameters())
    kept = {"settings": training.settings, "history": history}
    save_checkpoint(options.out / "weights.safetensors", model, progress=kept)
    print(
        f"\n{data.name}, {options.model}, {number} parameters: test accuracy "
        f"{100 * history[-1]['test_accuracy']:.2f} %\n{training.summary()}"
    )
    images, labels = training.data.test_images[:2000], training.data.test_labels[:2000]
    trained = options.iterations
    print(f"accuracy on {len(images)} test images by iterations:")
    for iterations in sorted({max(1, trained // 2), trained, 2 * trained}):
        right = accuracy(model, images, labels, iterations=iterations)
        print(f"  {iterations:3d}  {100 * right:.2f} %")
    print(f"tables, checkpoint and weights: {options.out}")


def main() -> None:
    options = arguments()
    fabric = start_processes(
        options.devices, options.accelerator, options.precision,
        unused_parameters=options.random_iterations is not None,
    )  # fmt: skip
    data = load(options.data).first(options.limit)
    if fabric.global_rank == 0:
        numbers = f"{len(data.train_images)} training and {len(data.test_images)} test images"
        print(f"data: {data.name}, {numbers}")
    apart = (*RUNNING, *SPECIFIED)
    settings = {name: value for name, value in vars(options).items() if name not in apart}
    settings["model"] = specification(options, data)
    logs: list[Any] = [CsvLog(options.out, options.log_every)]
    if options.tensorboard:
        logs.append(TensorBoardLog(options.out / "tensorboard", options.log_every))
    training = Training(
        build(options, data),
        data,
        recipe(options),
        options.out / "checkpoint.safetensors",
        settings,
        augment=None if options.no_augment else AUGMENTS[options.data],
        fabric=fabric,
        save_every=options.save_every,
        logs=logs,
        compile=options.compile,
    )
    run_script(training, resume=options.resume)
    if fabric.global_rank == 0:
        report(training, options, data)


if __name__ == "__main__":
    main()

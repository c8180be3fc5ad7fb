"""Train attention made of coupled vector spins to read MNIST, and watch the couplings form.

    implicit-attn train mnist-spins                 # the full training, minutes an epoch at most
    implicit-attn train mnist-spins --resume        # go on where an interrupted run stopped
    implicit-attn train mnist-spins --shipped       # no training: study the weights that come along
    implicit-attn train mnist-spins --overwrite     # replace the files of an earlier run in the folder

An image becomes the fields x of 16 sites; a class token has a learned field. The layer returns their
mean-field response ``z = J z - f(z) + x``. The state of the class token, which depends on the image
through the couplings J alone, is read out. MNIST is taken from $IMPLICIT_ATTN_DATA or downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import solvers
from implicit_attn.checkpoint import load_checkpoint, read_progress
from implicit_attn.checkpoint.files import RunLock
from implicit_attn.command_line import Parser, command, count, mistakes, positive, whole
from implicit_attn.data import RandomAffine, load
from implicit_attn.data.unpacking import damaged
from implicit_attn.models import SpinClassifier
from implicit_attn.studies import write_report
from implicit_attn.training import Training, accuracy, run_script
from implicit_attn.training.claims import remove_results
from implicit_attn.training.options import (
    add_result_options,
    add_solver_options,
    add_training_options,
    build_recipe,
    layer_options,
    settings,
)
from implicit_attn.training.script import checkpoint_path, claim, save_weights
from implicit_attn.weights import weights_path

SHIPPED = weights_path("mnist-spins")


def command_line() -> Parser:
    parser = Parser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--data", choices=("mnist", "fashion-mnist"), default="mnist")
    add("--dim", type=whole(1, 500), default=10, help="components of a site")
    add("--bound", type=positive, default=0.9, help="bound on the spectral norm of the couplings")
    add("--epochs", type=count, default=10)
    add_training_options(parser, batch=128, rate=4e-3)
    add_solver_options(parser, rtol=1e-4)
    add("--limit", type=count, help="use only so many training images")
    add_result_options(parser, "folder of the report (default runs/DATA-spins[-shipped])")
    add("--shipped", action="store_true", help="train nothing, study the shipped weights")
    return parser


def complete(parser: Parser, options: argparse.Namespace) -> argparse.Namespace:
    given = [name for name in vars(options) if getattr(options, name) != parser.get_default(name)]
    unused = sorted(set(given) - {"shipped", "out", "overwrite"})
    if options.shipped and unused:
        parser.error(f"--shipped studies weights as they were trained and takes no --{unused[0]}")
    kind = "spins-shipped" if options.shipped else "spins"
    options.out = options.out or Path("runs") / f"{options.data}-{kind}"
    return options


def build(options: argparse.Namespace) -> SpinClassifier:
    torch.manual_seed(options.seed)
    return SpinClassifier(
        dim=options.dim,
        bound=options.bound,
        layer=layer_options(options, tolerance=solvers.Tolerance, adjoint=solvers.Implicit),
    )


def site_norms(model: SpinClassifier) -> list[list[float]]:
    """Frobenius norms of the couplings between sites, rounded for the checkpoint."""
    with torch.no_grad():
        norms = model.attention.couplings.site_norms()
    return [[round(value, 4) for value in row] for row in norms.tolist()]


def report(model: SpinClassifier, data: Any, history: Any, couplings: Any, options: Any) -> None:
    """Tables as CSV and text, one picture."""
    right = 100 * accuracy(model, data.test_images, data.test_labels)
    title = (
        f"{options.data}, spins of dimension {model.attention.couplings.dim}: test accuracy "
        f"{right:.2f} %, {model.parameter_count} parameters"
    )
    print(f"\n{title}")
    print(write_report(model, data, history, options.out, title, options.rtol, couplings))
    print(f"\nreport: {options.out / 'report.png'} (tables beside it as CSV)")


def study_shipped(options: argparse.Namespace) -> None:
    """The report of the shipped weights, over that of an earlier run only with ``--overwrite``."""
    path = checkpoint_path(options)
    with mistakes("--shipped"), damaged(SHIPPED, "the checkpoint of this example"):
        progress = read_progress(SHIPPED)
        for name, value in progress["settings"].items():
            setattr(options, name, value)  # the model as it was trained
        model = build(options)
        load_checkpoint(SHIPPED, model)
    with mistakes("--data"):
        data = load(options.data)
    # Nothing of the run that is replaced stays beside the report of another model.
    remove_results(path)
    path.unlink(missing_ok=True)
    report(model, data, progress["history"], progress["observations"], options)


def train(options: argparse.Namespace, lock: RunLock) -> None:
    with mistakes("--data"):
        data = load(options.data).first(options.limit)
    with mistakes():
        training = Training(
            build(options),
            data,
            build_recipe(options, floor=0.002),
            checkpoint_path(options),
            settings(options, "shipped"),
            augment=RandomAffine(),
            observe=site_norms,
        )
    run_script(training, resume=options.resume, overwrite=options.overwrite, lock=lock)
    print(f"\n{training.summary()}")
    save_weights(training)
    report(training.model, data, training.history, training.observations, options)  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line()
    with command(parser):
        options = complete(parser, parser.parse_args(arguments))
        with claim(options) as lock:
            if options.shipped:
                study_shipped(options)
            else:
                train(options, lock)


if __name__ == "__main__":
    main()

"""Train an energy-defined equilibrium layer to read handwritten digits, and report on it.

    python examples/classify.py                          # embedded 8x8 digits, about a minute
    python examples/classify.py --data mnist --patch 4   # MNIST, local or downloaded
    python examples/classify.py --resume                 # go on where an interrupted run stopped

Each image becomes tokens x; the layer returns the tokens z* that minimise
``a E_attention(z) + b E_memory(z) + 1/2 |z - x|^2``; a linear readout classifies z*.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import solvers
from implicit_attn.data import LOADERS, ImageData, load
from implicit_attn.models import PatchClassifier
from implicit_attn.studies import write_report
from implicit_attn.training import Recipe, Training, run_script


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
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
    add("--patch", type=int, default=2, help="height = width of a patch")
    add("--dim", type=int, default=64, help="features of a token")
    add("--heads", type=int, default=4)
    add("--memories", type=int, default=128, help="rows of the feed-forward energy")
    add("--bound", type=float, default=2.0, help="bound on the spectral norms of the projections")
    add("--maximum", type=float, default=2.0, help="bound on the weights of the energies")
    add("--epochs", type=int, help="default: 16, and 20 for the class token")
    add("--batch", type=int, default=64)
    add("--rate", type=float, default=2e-3, help="peak learning rate (cosine decay)")
    add(
        "--rtol", type=float, default=1e-3, help="relative residual at which a sample has converged"
    )
    add("--max-steps", type=int, default=60, help="evaluations per sample, at most")
    add("--seed", type=int, default=0)
    add("--limit", type=int, default=0, help="use only so many training images (0: all)")
    add("--out", type=Path, default=None, help="folder of the report (default runs/DATA-READOUT)")
    add("--resume", action="store_true", help="continue from the checkpoint in that folder")
    options = parser.parse_args()
    if options.limit < 0:
        parser.error(f"--limit must be >= 0, got {options.limit}")
    if options.epochs is None:
        options.epochs = 20 if options.readout == "class" else 16
    for name in ("epochs", "batch", "patch", "dim", "heads", "memories", "max_steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, got {getattr(options, name)}")
    options.stem = options.stem or ("conv" if options.readout == "class" else "patch")
    options.out = options.out or Path("runs") / f"{options.data}-{options.readout}"
    return options


def build(options: argparse.Namespace, data: ImageData) -> PatchClassifier:
    torch.manual_seed(options.seed)
    _, channels, size, _ = data.train_images.shape
    return PatchClassifier(
        size,
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
        layer={
            "tolerance": solvers.Tolerance(rtol=options.rtol),
            "max_steps": options.max_steps,
            # Failures are counted and shown with the loss instead of warned about.
            "on_failure": "ignore",
            "adjoint": solvers.Implicit(on_failure="ignore"),
        },
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


def main() -> None:
    options = arguments()
    data = load(options.data).first(options.limit or None)
    settings = {name: v for name, v in vars(options).items() if name not in ("out", "resume")}
    training = Training(
        build(options, data),
        data,
        Recipe(options.epochs, options.batch, options.rate, seed=options.seed),
        options.out / "checkpoint.safetensors",
        settings,
    )
    run_script(training, resume=options.resume)
    report(training, options)


if __name__ == "__main__":
    main()

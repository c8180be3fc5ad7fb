"""Train an energy-defined equilibrium layer to read handwritten digits, and report on it.

    python examples/classify.py                          # embedded 8x8 digits, about a minute
    python examples/classify.py --data mnist --patch 4   # MNIST, local or downloaded
    python examples/classify.py --resume                 # go on where an interrupted run stopped

Each image becomes tokens x; the layer returns the tokens z* that minimise
``a E_attention(z) + b E_memory(z) + 1/2 |z - x|^2``; a linear readout classifies z*.
"""

from __future__ import annotations

import argparse
import math
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

import solvers
from implicit_attn.checkpoint import load_checkpoint, read_progress, save_checkpoint
from implicit_attn.data import LOADERS, ImageData, batches, epoch_generator, load
from implicit_attn.models import PatchClassifier
from implicit_attn.studies import write_report


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


class Training:
    """State of a run: what the checkpoint holds."""

    def __init__(self, options: argparse.Namespace, data: ImageData) -> None:
        self.options, self.data = options, data
        self.model = build(options, data)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.rate, weight_decay=1e-2
        )
        self.epoch, self.batch = 0, 0
        self.sums: dict[str, float] = {}
        self.spent = [0] * (options.max_steps + 1)  # samples of the epoch by their evaluations
        self.history: list[dict[str, Any]] = []
        self.path = options.out / "checkpoint.safetensors"
        self.seconds = 0.0  # spent on this epoch
        self.stopping = False

    @property
    def settings(self) -> dict[str, Any]:
        ignored = {"out", "resume"}
        return {name: v for name, v in vars(self.options).items() if name not in ignored}

    def save(self) -> None:
        names = ("epoch", "batch", "sums", "spent", "seconds", "history", "settings")
        progress = {name: getattr(self, name) for name in names}
        save_checkpoint(self.path, self.model, self.optimizer, progress)

    def resume(self) -> None:
        if not self.path.is_file():
            raise SystemExit(f"nothing to resume: there is no {self.path}")
        progress = read_progress(self.path)
        if progress["settings"] != self.settings:
            raise SystemExit(
                f"{self.path} was made with other settings: {progress['settings']}; "
                "give the same options, or another --out"
            )
        load_checkpoint(self.path, self.model, self.optimizer)
        for name in ("epoch", "batch", "sums", "spent", "seconds", "history"):
            setattr(self, name, progress[name])

    def stop(self) -> None:
        """Ctrl-C: finish the batch, save, leave. A second one leaves at once."""
        self.stopping = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def run(self) -> None:
        while self.epoch < self.options.epochs:
            self.run_epoch()
            self.epoch, self.batch, self.sums = self.epoch + 1, 0, {}
            self.spent, self.seconds = [0] * len(self.spent), 0.0
            self.save()

    def run_epoch(self) -> None:
        options, data = self.options, self.data
        generator = epoch_generator(options.seed, self.epoch)
        parts = list(batches(data.train_images, data.train_labels, options.batch, generator))
        start = time.perf_counter() - self.seconds
        bar = tqdm(
            parts, desc=f"epoch {self.epoch + 1}/{options.epochs}", unit="batch", leave=False
        )
        for index, (images, labels) in enumerate(bar):
            if index < self.batch:  # already done before an interruption
                continue
            self.step(images, labels, (self.epoch + index / len(parts)) / options.epochs)
            self.batch = index + 1
            self.seconds = time.perf_counter() - start
            bar.set_postfix_str(self.status())
            if self.stopping:
                bar.close()
                self.save()
                print(f"interrupted; {self.path} holds everything: continue with --resume")
                raise SystemExit(130)
        row = {"epoch": self.epoch + 1, **self.means(), "seconds": self.seconds}
        row["test_accuracy"] = accuracy(self.model, data.test_images, data.test_labels)
        self.history.append(row)
        tqdm.write(
            f"epoch {row['epoch']:3d}  {self.status()}  test {100 * row['test_accuracy']:.2f} %  "
            f"{row['seconds']:.1f} s"
        )

    def step(self, images: Tensor, labels: Tensor, progress: float) -> None:
        """One optimiser step; ``progress`` in [0, 1) sets the learning rate."""
        warm = min(1.0, progress * 20)
        for group in self.optimizer.param_groups:
            group["lr"] = (
                self.options.rate * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
            )
        self.model.train()
        loss = F.cross_entropy(self.model(images), labels)
        if not math.isfinite(loss.item()):
            self.save()
            raise SystemExit(
                f"the loss is {loss.item()} in epoch {self.epoch + 1}, batch {self.batch + 1}; the "
                f"state before that batch is in {self.path}"
            )
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        solve = self.model.layer.last
        assert solve is not None
        adjoint = solve.adjoint.solution
        assert adjoint is not None
        number = len(images)
        for name, value in {
            "samples": number,
            "loss": loss.item() * number,
            "converged": int(solve.converged.sum()),
            "adjoint_converged": int(adjoint.converged.sum()),
            "adjoint_products": int(adjoint.evaluations.sum()),
        }.items():
            self.sums[name] = self.sums.get(name, 0) + value
        for evaluations in solve.evaluations.tolist():
            self.spent[evaluations] += 1
        worst = adjoint.residual.max().item()
        self.sums["adjoint_residual"] = max(self.sums.get("adjoint_residual", 0.0), worst)
        self.sums["most_evaluations"] = max(
            self.sums.get("most_evaluations", 0), int(solve.evaluations.max())
        )

    def means(self) -> dict[str, float]:
        worst = ("adjoint_residual", "most_evaluations")
        number = max(self.sums.get("samples", 0), 1)
        mean = {n: v / number for n, v in self.sums.items() if n not in (*worst, "samples")}
        mean["evaluations"] = median_of_counts(self.spent)
        return mean | {name: self.sums.get(name, 0.0) for name in worst}

    def status(self) -> str:
        row = self.means()
        return (
            f"loss {row['loss']:.4f}  converged {100 * row['converged']:.1f} %  "
            f"evaluations {row['evaluations']}  adjoint {row['adjoint_residual']:.0e}"
        )


def median_of_counts(counts: list[int]) -> int:
    """Median of numbers given as how often each occurs."""
    half, seen = sum(counts) / 2, 0
    for number, count in enumerate(counts):
        seen += count
        if seen >= half:
            return number
    return 0


def accuracy(model: PatchClassifier, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = 0
    with torch.no_grad():
        for part, answers in batches(images, labels, 256):
            right += int((model(part).argmax(1) == answers).sum())
    return right / len(images)


def report(training: Training) -> None:
    """Tables as CSV and text, one picture."""
    options, history = training.options, training.history
    last, number = history[-1], sum(p.numel() for p in training.model.parameters())
    title = (
        f"{options.data}, {options.readout} readout: test accuracy "
        f"{100 * last['test_accuracy']:.2f} %, {number} parameters"
    )
    print(f"\n{title}")
    print(write_report(training.model, training.data, history, options.out, title, options.rtol))
    seconds = sum(row["seconds"] for row in history)
    share = 100 * min(row["converged"] for row in history)
    spent = max(row["evaluations"] for row in history)
    print(
        f"\ntraining {seconds:.0f} s; worst epoch: {share:.2f} % of training samples converged, "
        f"median evaluations per sample {spent:g}"
    )
    print(f"report: {options.out / 'report.png'} (tables beside it as CSV)")


def main() -> None:
    options = arguments()
    data = load(options.data)
    if options.limit:
        data = ImageData(
            data.name,
            data.classes,
            data.train_images[: options.limit],
            data.train_labels[: options.limit],
            data.test_images,
            data.test_labels,
        )
    training = Training(options, data)
    if options.resume:
        training.resume()
    elif training.path.exists():
        print(f"{training.path} of an earlier run will be replaced (--resume would continue it)")
    signal.signal(signal.SIGINT, lambda *_: training.stop())
    training.run()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    report(training)


if __name__ == "__main__":
    main()

"""Hyper-SET, its equilibrium and rivals of the same size and effort: CIFAR-10, and hidden patches.

    python benchmarks/images.py cifar10 [--rows hyperset transformer] [--epochs 3] [--logistic]
    python benchmarks/images.py masked [--data digits] [--rows hyperset transformer] [--seeds 3]

Every run is ``implicit-attn train`` with the words of a row, in a folder of its own; a command that was
interrupted goes on where it stopped, ``--no-train`` only shows what is done.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measure import table
from benchmarks.trainings import ROOT, WEIGHTS, Run, history, perform
from implicit_attn import studies
from implicit_attn.data import ImageData, load

# The words that make the parameters of all about as many, and the accuracies published with Hyper-SET
# (Hu, Zou, Xu, https://arxiv.org/abs/2502.11646): width 384, 200 epochs.
ROWS: dict[str, tuple[tuple[str, ...], str]] = {
    "hyperset": ((), "88.89 % (0.96 M)"),
    "hyperset-equilibrium": ((), "-"),
    "transformer": ((), "89.90 % (1.79 M)"),
    "energy-transformer": (("width=660",), "75.98 %"),
    "crate": (("dim=80",), "86.97 %"),
}
MASKED = ("hyperset", "transformer", "energy-transformer", "hyperset-equilibrium")


def cifar10(
    rows: tuple[str, ...] = tuple(ROWS),
    seeds: int = 1,
    epochs: int = 3,
    limit: int = 50_000,
    logistic: bool = False,
    workers: int = 2,
    out: Path = Path("runs/cifar10"),
    train: bool = True,
) -> None:
    """CIFAR-10 on a CPU: accuracies of 10,000 test images with 1, 2 and 4 times training's iterations.

    All train with the same batches of the same augmented images, rate and schedule. An equilibrium is
    solved by plain iteration with at most as many evaluations.

    Args:
        limit: training images.
        logistic: only logistic regression on the pixels.
        workers: processes at a time.
        out: folder of the runs.
        train: what is missing.
    """
    if logistic:
        right = logistic_accuracy(load("cifar10").first(limit))
        print(f"logistic regression on the pixels: {100 * right:.2f} %")
        return
    shared = ("--data", "cifar10", "--epochs", str(epochs), "--limit", str(limit))
    runs = [
        Run(row, seed, ("vit-images", "--model", row, *shared, *ROWS[row][0]), "cifar10")
        for seed in range(seeds)
        for row in rows
    ]
    found: dict[str, dict[str, Any]] = {}
    for run in perform(runs, out, workers, train):
        row = found.setdefault(run.row, {"model": run.row})
        for key, value in measured(run.folder(out)).items():
            row[key] = f"{row[key]} {value}" if key in row and key != "parameters" else value
    print(table([row | {"published": ROWS[name][1]} for name, row in found.items()]))


def measured(folder: Path) -> dict[str, str]:
    """Accuracies of a trained model, and what its training took."""
    subject = studies.open_subject(folder / WEIGHTS)
    number = sum(each.numel() for each in subject.model.parameters())
    found = {"parameters": f"{number:,}", "iterations": str(subject.trained)}
    numbers = [times * subject.trained for times in (1, 2, 4)]
    if subject.recurrence is not None:
        rows = studies.accuracy_by_iterations(subject, numbers)
    else:
        solver = studies.solver_choices(subject.layer)["forward"]
        rows = studies.accuracy_by_evaluations(subject, numbers, *solver)
    for times, row in zip((1, 2, 4), rows, strict=True):
        found[f"{times}x, %"] = f"{100 * row['accuracy']:.2f}"
    return found | {"minutes": f"{sum(row['seconds'] for row in history(folder)) / 60:.1f}"}


def logistic_accuracy(data: ImageData) -> float:
    """Test accuracy of a linear map of the pixels, by 20 epochs of Adam in batches of 128."""
    torch.manual_seed(0)
    pixels, tests = (each.flatten(1) - 0.5 for each in (data.train_images, data.test_images))
    model = torch.nn.Linear(pixels.shape[1], data.classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for _ in range(20):
        for chosen in torch.randperm(len(pixels)).split(128):
            optimizer.zero_grad()
            outputs = model(pixels[chosen])
            torch.nn.functional.cross_entropy(outputs, data.train_labels[chosen]).backward()
            optimizer.step()
    with torch.no_grad():
        return (model(tests).argmax(1) == data.test_labels).double().mean().item()


def masked(
    data: Literal["digits", "mnist", "fashion-mnist", "cifar10"] = "digits",
    rows: tuple[str, ...] = MASKED,
    seeds: int = 3,
    epochs: int | None = None,
    limit: int | None = None,
    workers: int = 2,
    out: Path = Path("runs/masked"),
    train: bool = True,
) -> None:
    """Error of hidden patches with 1/4 to 4 times training's iterations, beside simple fillings.

    Args:
        epochs: in place of the program's own.
        limit: training images.
        workers: processes at a time.
        out: folder of the runs, of their tables and figure.
        train: what is missing.
    """
    shared = ["--data", data]
    for name, value in (("--epochs", epochs), ("--limit", limit)):
        shared += [] if value is None else [name, str(value)]
    runs = [
        Run(row, seed, ("masked-images", "--model", row, *shared), data)
        for seed in range(seeds)
        for row in rows
    ]
    folders = [str(run.folder(out)) for run in perform(runs, out, workers, train)]
    program = ROOT / "examples" / "masked_images.py"
    words = [sys.executable, str(program), "--runs", *folders, "--out", str(out)]
    raise SystemExit(subprocess.run(words, check=False).returncode)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"cifar10": cifar10, "masked": masked})

"""CIFAR-10 on a CPU: Hyper-SET, its equilibrium and three rivals of the same size and effort.

python benchmarks/images/cifar10.py [--rows hyperset transformer ...] [--seeds 1] [--epochs 3]
    [--limit 50000] [--workers 2] [--out runs/cifar10] [--table] [--logistic]

Every run is ``train vit-images --data cifar10`` with the words of a row, in a folder of its own; a
command that was interrupted goes on where it stopped. All train with the same batches of the same
augmented images, rate and schedule. "1x" is the accuracy with the iterations of training, all 10,000 test
images; an equilibrium is solved by plain iteration with at most as many evaluations.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.measure import table
from benchmarks.trainings.runs import WEIGHTS, Run, add_run_options, run_command
from implicit_attn.command_line import Parser, command, count, mistakes, repeats
from implicit_attn.data import ImageData, load
from implicit_attn.studies import (
    Subject,
    accuracy_by_evaluations,
    accuracy_by_iterations,
    open_subject,
    solver_choices,
)

EXAMPLE = "vit-images"
TIMES = (1, 2, 4)
# The words that make the parameters of all about as many, and the accuracies published with Hyper-SET
# (Hu, Zou, Xu, https://arxiv.org/abs/2502.11646): width 384, 200 epochs.
ROWS: dict[str, tuple[tuple[str, ...], str]] = {
    "hyperset": ((), "88.89 % (0.96 M)"),
    "hyperset-equilibrium": ((), "-"),
    "transformer": ((), "89.90 % (1.79 M)"),
    "energy-transformer": (("width=660",), "75.98 %"),
    "crate": (("dim=80",), "86.97 %"),
}


def parser() -> Parser:
    made = Parser(description="Hyper-SET and its rivals on CIFAR-10, of one size and effort.")
    add = made.add_argument
    add("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="all by default")
    add("--seeds", type=repeats, default=1)
    add("--epochs", type=count, default=3)
    add("--limit", type=count, default=50_000, help="training images")
    add("--logistic", action="store_true", help="only logistic regression on the pixels")
    add_run_options(made, Path("runs/cifar10"))
    return made


def plan(options: Any) -> list[Run]:
    """The runs: all first seeds before second ones."""
    shared = ["--data", "cifar10", "--epochs", str(options.epochs), "--limit", str(options.limit)]
    return [
        Run("cifar10", row, seed, ("--model", row, *shared, *ROWS[row][0]), EXAMPLE)
        for seed in range(options.seeds)
        for row in dict.fromkeys(options.rows)
    ]


def show(options: Any, runs: list[Run]) -> None:
    """A line for every row: accuracies of its seeds with 1, 2 and 4 times the iterations."""
    rows = []
    for name in dict.fromkeys(run.row for run in runs):
        found = [measure(options.out / run.folder) for run in runs if run.row == name]
        row: dict[str, Any] = {"model": name, "parameters": f"{found[0]['parameters']:,}"}
        for key in found[0]:
            if key != "parameters":
                row[key] = " ".join(each[key] for each in found)
        rows.append(row | {"published": ROWS[name][1]})
    print(table(rows))


def measure(folder: Path) -> dict[str, Any]:
    """Accuracies of a trained model, and what its training took."""
    with mistakes("--out"):
        subject = open_subject(folder / WEIGHTS)
    trained = subject.trained
    found: dict[str, Any] = {
        "parameters": sum(each.numel() for each in subject.model.parameters()),
        "iterations": str(trained),
    }
    rows = by_iterations(subject, [times * trained for times in TIMES])
    for times, row in zip(TIMES, rows, strict=True):
        found[f"{times}x, %"] = f"{100 * row['accuracy']:.2f}"
    with (folder / "checkpoint.csv").open(newline="") as file:
        epochs = list(csv.DictReader(file))
    found["minutes"] = f"{sum(float(each['seconds']) for each in epochs) / 60:.1f}"
    return found


def logistic_accuracy(data: ImageData, epochs: int = 20, rate: float = 3e-4) -> float:
    """Test accuracy of a linear map of the pixels, by Adam in batches of 128."""
    torch.manual_seed(0)
    pixels, tests = (each.flatten(1) - 0.5 for each in (data.train_images, data.test_images))
    model = torch.nn.Linear(pixels.shape[1], data.classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(epochs):
        for chosen in torch.randperm(len(pixels)).split(128):
            optimizer.zero_grad()
            outputs = model(pixels[chosen])
            torch.nn.functional.cross_entropy(outputs, data.train_labels[chosen]).backward()
            optimizer.step()
    with torch.no_grad():
        return (model(tests).argmax(1) == data.test_labels).double().mean().item()


def by_iterations(subject: Subject, numbers: list[int]) -> Any:
    """Accuracy after each number of iterations, or evaluations of an equilibrium."""
    if subject.recurrence is not None:
        return accuracy_by_iterations(subject, numbers)
    return accuracy_by_evaluations(subject, numbers, *solver_choices(subject.layer)["forward"])


def main(arguments: list[str] | None = None) -> None:
    if parser().parse_known_args(arguments)[0].logistic:
        with command(parser()):
            options = parser().parse_args(arguments)
            right = logistic_accuracy(load("cifar10").first(options.limit))
            print(f"logistic regression on the pixels: {100 * right:.2f} %")
        return
    run_command(parser(), arguments, plan, show)


if __name__ == "__main__":
    main()

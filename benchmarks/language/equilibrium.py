"""A language model of one block at its fixed point, beside stacks of blocks and its own forms.

python benchmarks/language/equilibrium.py [--text austen] [--rows drawn ...] [--seeds 3] [--steps 1200]
    [--workers 2] [--out runs/language-equilibrium] [--table]

Width 64, 4 heads, windows of 64 characters, each row at several learning rates. "drawn" is the default of
``implicit-attn train language-model --model equilibrium``: iterations drawn from 4 to 20, gradients
through all; judged after 12, 24 and 48 by the loss on held-out text. One block has as many parameters.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.language.rows import EXAMPLE
from benchmarks.measure import table
from benchmarks.trainings.runs import WEIGHTS, Run, add_run_options, run_command
from implicit_attn.command_line import Parser, count, mistakes, repeats
from implicit_attn.data import TextData, load_text
from implicit_attn.models import EquilibriumLanguageModel, load_model
from implicit_attn.training import NextToken

NUMBERS = (12, 24, 48)
SIZE = ("dim=64", "length=64", "dropout=0", "betas=[0.9,0.95]", "--batch", "16")
DRAWN = ("--model", "equilibrium")
ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # words, learning rates
    "one block": (("layers=1",), ("1e-2", "2e-2")),
    "one pass": ((*DRAWN, "iterations=1"), ("1e-2", "2e-2")),
    "three blocks": (("layers=3", "initial=torch"), ("6e-3", "1e-2")),
    "six blocks": (("layers=6", "initial=torch"), ("6e-3", "1e-2")),
    "drawn": (DRAWN, ("6e-3", "1e-2", "2e-2")),
    "fixed": ((*DRAWN, "iterations=12"), ("1e-2",)),
    "drawn, last 4": ((*DRAWN, "gradient=4"), ("1e-2",)),
    "drawn, implicit": ((*DRAWN, "gradient=implicit"), ("1e-2",)),
}


def parser() -> Parser:
    made = Parser(description="A language model at its fixed point, beside stacks of blocks.")
    add = made.add_argument
    add("--text", default="austen", help="name or path of the text (default austen)")
    add("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    add("--seeds", type=repeats, default=3)
    add("--steps", type=count, default=1200)
    add_run_options(made, Path("runs/language-equilibrium"))
    return made


def plan(options: Any) -> list[Run]:
    """The runs: all first seeds before second ones."""
    shared = ("--text", options.text, *SIZE, "--steps", str(options.steps))
    return [
        Run("tiny", f"{row}, {rate}", seed, (*shared, *ROWS[row][0], "--rate", rate), EXAMPLE)
        for seed in range(options.seeds)
        for row in options.rows
        for rate in ROWS[row][1]
    ]


def show(options: Any, runs: list[Run]) -> None:
    """A line for every row and rate: losses by evaluations, residuals, seconds."""
    with mistakes("--text"):
        data = load_text(options.text)
    rows = []
    for name in dict.fromkeys(run.row for run in runs):
        found = [measure(options.out / run.folder, data) for run in runs if run.row == name]
        row: dict[str, Any] = {"model": name, "parameters": f"{found[0].pop('parameters'):,}"}
        row["mean"] = f"{mean(each['12'] for each in found):.4f}"
        for key, form in (("12", ".4f"), ("24", ".4f"), ("48", ".4f"), ("residual", ".0e")):
            row[key] = " ".join(f"{each[key]:{form}}" for each in found if key in each)
        row["seconds"] = f"{mean(each['seconds'] for each in found):.0f}"
        rows.append(row)
    print(table(rows))


@torch.no_grad()
def measure(folder: Path, data: TextData) -> dict[str, Any]:
    """What a trained model gives after 12, 24 and 48 evaluations; a stack has one number."""
    model, progress = load_model(folder / WEIGHTS)
    length, windows = progress["settings"]["model"]["length"], progress["settings"]["windows"]
    task = NextToken(data, length, windows)
    found: dict[str, Any] = {"parameters": sum(each.numel() for each in model.parameters())}
    trained = progress["settings"]["model"].get("iterations")
    solved = isinstance(model, EquilibriumLanguageModel) and trained != 1
    for number in NUMBERS if solved else NUMBERS[:1]:
        total, terms = task.evaluate(model, 0, 1, number if solved else None)["validation_loss"]
        found[str(number)] = total / terms
    if isinstance(model, EquilibriumLanguageModel) and solved:
        tokens = model.tokens(next(task.tests(0, 1))[0])
        z, after = (model.mix(tokens, number) for number in (NUMBERS[-1], NUMBERS[-1] + 1))
        found["residual"] = ((after - z).norm() / after.norm()).item()
    with (folder / "checkpoint.csv").open(newline="") as file:
        found["seconds"] = sum(float(row["seconds"]) for row in csv.DictReader(file))
    return found


def main(arguments: list[str] | None = None) -> None:
    run_command(parser(), arguments, plan, show)


if __name__ == "__main__":
    main()

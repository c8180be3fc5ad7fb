"""A language model of one shared block at its fixed point, beside others of the same parameters.

python benchmarks/language/equilibrium.py [--text austen] [--seeds 2] [--steps 1200] [--workers 2]
    [--out runs/language-equilibrium] [--table]

Trained with 12 evaluations of the block, judged with 12, 24 and 48 by the loss on held-out text: with
gradients through the last four ("equilibrium", the default), by the implicit function theorem, through
all evaluations ("unrolled"), and a decoder of one block, which has as many parameters and no iterations.
Each at two learning rates. "converged" is the share of the training windows whose residual was below the
tolerance.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.language.rows import EXAMPLE, SIZES
from benchmarks.measure import table
from benchmarks.trainings.runs import WEIGHTS, Run, add_run_options, run_command
from implicit_attn.command_line import Parser, count, mistakes, repeats
from implicit_attn.data import TextData, load_text
from implicit_attn.models import EquilibriumLanguageModel, load_model
from implicit_attn.training import NextToken

NUMBERS = (12, 24, 48)
RATES = ("1e-3", "3e-3")
SHARED = ("--model", "equilibrium", "--iterations", str(NUMBERS[0]))
ROWS: dict[str, tuple[str, ...]] = {
    "one block": ("layers=1",),
    "equilibrium": SHARED,
    "implicit": (*SHARED, "gradient=implicit"),
    "unrolled": (*SHARED, "gradient=unrolled"),
}


def parser() -> Parser:
    made = Parser(description="A language model at its fixed point, beside others of its size.")
    add = made.add_argument
    add("--text", default="austen", help="name or path of the text (default austen)")
    add("--seeds", type=repeats, default=2)
    add("--steps", type=count, default=1200)
    add_run_options(made, Path("runs/language-equilibrium"))
    return made


def plan(options: Any) -> list[Run]:
    """The runs: all first seeds before second ones."""
    own = ("layers=", "windows=", "--steps", "600")
    sizes = [word for word in SIZES["tiny"] if not word.startswith(own)]
    every = max(1, options.steps // 12)
    shared = ["--text", options.text, *sizes, "--steps", str(options.steps)]
    shared += ["windows=256", f"evaluate_every={every}"]
    return [
        Run("tiny", f"{row}, {rate}", seed, (*shared, *words, "--rate", rate), EXAMPLE)
        for seed in range(options.seeds)
        for row, words in ROWS.items()
        for rate in RATES
    ]


def show(options: Any, runs: list[Run]) -> None:
    """A line for every row and rate: losses by evaluations, residuals, share of solves."""
    with mistakes("--text"):
        data = load_text(options.text)
    rows = []
    for name in dict.fromkeys(run.row for run in runs):
        found = [measure(options.out / run.folder, data) for run in runs if run.row == name]
        row: dict[str, Any] = {"model": name, "seeds": len(found)}
        row["parameters"] = f"{found[0]['parameters']:,}"
        for key in found[0]:
            if key != "parameters":
                row[key] = " ".join(each[key] for each in found)
        rows.append(row)
    print(table(rows))


def measure(folder: Path, data: TextData) -> dict[str, Any]:
    """What a trained model gives with more evaluations than in training."""
    model, progress = load_model(folder / WEIGHTS)
    length, windows = progress["settings"]["model"]["length"], progress["settings"]["windows"]
    task = NextToken(data, length, windows)
    found: dict[str, Any] = {"parameters": sum(each.numel() for each in model.parameters())}
    iterated = isinstance(model, EquilibriumLanguageModel)
    for number in NUMBERS:
        total, terms = task.evaluate(model, 0, 1, number if iterated else None)["validation_loss"]
        found[f"loss, {number}"] = f"{total / terms:.4f}"
    left = ["-"]
    if isinstance(model, EquilibriumLanguageModel):
        left = [f"{residual(model, task, number):.0e}" for number in NUMBERS]
    found["residual, " + " / ".join(map(str, NUMBERS))] = " / ".join(left)
    with (folder / "checkpoint.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    last = rows[-1]
    share = last.get("converged")
    told = share is not None and share != "nan"  # an unrolled model has no solves
    found["converged"] = f"{100 * float(share or 0):.1f} %" if told else "-"
    found["seconds"] = f"{sum(float(row['seconds']) for row in rows):.0f}"
    return found


def residual(model: EquilibriumLanguageModel, task: NextToken, number: int) -> float:
    """The median relative residual of the validation windows, also of a model trained unrolled."""
    seen: list[Tensor] = []
    trained, model.gradient = model.gradient, "implicit"  # the same state, its residual measured
    hook = model.register_forward_hook(lambda *_: seen.append(model.last.residual))
    task.evaluate(model, 0, 1, number)
    hook.remove()
    model.gradient = trained
    return torch.cat(seen).median().item()


def main(arguments: list[str] | None = None) -> None:
    run_command(parser(), arguments, plan, show)


if __name__ == "__main__":
    main()

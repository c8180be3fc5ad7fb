"""Attention as steps of descent in a language model: the forms, with their controls.

python benchmarks/language/forms.py [--text austen] [--size tiny small] [--rows plain momentum ...]
    [--workers 2] [--out runs/language-forms] [--figure FILE] [--table]

Every run is ``implicit-attn train language-model`` with the words of a row, in a folder of its own; a command
that was interrupted goes on where it stopped. Runs with the same seed see the same windows of the text
in the same order and begin with the same weights, but for "newton-taylor-no-value", which has fewer. All
sizes and rows took 137 minutes of one core. ``--steps`` and ``--rate`` replace the rows' own; ``--table``
trains nothing and shows what is done.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.language.claims import SOURCE, Losses, lines, verdicts
from benchmarks.language.figure import draw
from benchmarks.language.rows import EXAMPLE, ROWS, SIZES
from benchmarks.measure import table
from benchmarks.trainings.runs import WEIGHTS, Run, add_run_options, run_command
from implicit_attn.checkpoint import read_progress
from implicit_attn.command_line import (
    Parser,
    count,
    learning_rate,
    place,
    repeats,
)
from implicit_attn.models import load_model


def parser() -> Parser:
    made = Parser(description="Language models whose sublayers are steps of descent.")
    add = made.add_argument
    add("--text", default="austen", help="name or path of the text (default austen)")
    add("--size", nargs="+", choices=list(SIZES), default=list(SIZES), help="both by default")
    add("--rows", nargs="+", choices=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}")
    add("--seeds", type=repeats, help="instead of each row's own number of seeds")
    add("--steps", type=count, help="instead of the size's own")
    add("--rate", type=learning_rate, help="instead of 3e-3, for rows without one of their own")
    add("--figure", type=place, help="draw the curves to this file (PNG)")
    add_run_options(made, Path("runs/language-forms"))
    return made


def plan(options: Any) -> list[Run]:
    """The runs, in the order of their importance: first seeds before second ones."""
    found: list[Run] = []
    for size in dict.fromkeys(options.size):
        for row in (ROWS[name] for name in options.rows or ROWS):
            number = row.seeds[size] if options.seeds is None else options.seeds
            if options.rows and options.seeds is None:
                number = max(1, number)  # what is asked for by name is run
            words = ["--text", options.text, *SIZES[size]]
            words += [] if options.rate is None else ["--rate", str(options.rate)]
            words += row.words
            if options.steps is not None:
                every = max(1, options.steps // 12)
                words += ["--steps", str(options.steps), f"evaluate_every={every}"]
            found += [Run(size, row.name, seed, tuple(words), EXAMPLE) for seed in range(number)]
    order = list(dict.fromkeys(options.size))
    return sorted(found, key=lambda run: (order.index(run.size), run.seed))


def read_losses(run: Run, folder: Path) -> dict[int, float]:
    """Validation loss by the number of steps done."""
    path = folder / run.folder / "checkpoint.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    settings = read_progress(path.with_suffix(".safetensors"))["settings"]
    every = settings["steps"] // settings["epochs"]
    return {every * int(row["epoch"]): float(row["validation_loss"]) for row in rows}


def show(options: Any, runs: list[Run]) -> None:
    """Table, claims and figure of what is done."""
    losses: Losses = {run: read_losses(run, options.out) for run in runs}
    parameters = {
        run: sum(each.numel() for each in load_model(options.out / run.folder / WEIGHTS)[0].parameters())
        for run in runs
    }  # fmt: skip
    for size in dict.fromkeys(run.size for run in runs):
        print(table(lines(losses, parameters, size)))
        print(f"\nclaims of {SOURCE}, {size}:")
        print("\n".join(verdicts(losses, size)) + "\n")
    if options.figure:
        draw(options.figure, losses)


def main(arguments: list[str] | None = None) -> None:
    run_command(parser(), arguments, plan, show)


if __name__ == "__main__":
    main()

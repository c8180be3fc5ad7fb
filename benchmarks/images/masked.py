"""Masked images: Hyper-SET, its equilibrium and two rivals of the same size and effort.

python benchmarks/images/masked.py [--data digits] [--rows hyperset transformer ...] [--seeds 3]
    [--epochs N] [--limit N] [--workers 2] [--out runs/masked] [--table]

Every run is ``implicit-attn train masked-images`` with the words of a row, in a folder of its own; a command
that was interrupted goes on where it stopped. Table and figure, of ``examples/attention/masked_images.py``,
have the error of hidden patches with 1/4 to 4 times the iterations of training, beside
fillings that learn nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))


from benchmarks.trainings.runs import Run, add_run_options, run_command
from implicit_attn.command_line import Parser, count, repeats
from implicit_attn.data import LOADERS

EXAMPLE = "masked-images"
ROWS = ("hyperset", "transformer", "energy-transformer", "hyperset-equilibrium")


def parser() -> Parser:
    made = Parser(description="Models of hidden patches, of one size and effort.")
    add = made.add_argument
    add("--data", choices=sorted(LOADERS), default="digits")
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="all by default")
    add("--seeds", type=repeats, default=3)
    add("--epochs", type=count, help="instead of the example's own")
    add("--limit", type=count, help="use only so many training images")
    add_run_options(made, Path("runs/masked"))
    return made


def plan(options: Any) -> list[Run]:
    """The runs: all first seeds before second ones."""
    shared = ["--data", options.data]
    for name in ("epochs", "limit"):
        value = getattr(options, name)
        shared += [] if value is None else [f"--{name}", str(value)]
    return [
        Run(options.data, row, seed, ("--model", row, *shared), EXAMPLE)
        for seed in range(options.seeds)
        for row in dict.fromkeys(options.rows)
    ]


def show(options: Any, runs: list[Run]) -> None:
    folders = [str(options.out / run.folder) for run in runs]
    program = str(
        Path(__file__).resolve().parents[2] / "examples" / "attention" / "masked_images.py"
    )
    subprocess.run(
        [sys.executable, program, "--runs", *folders, "--out", str(options.out)], check=False
    )


def main(arguments: list[str] | None = None) -> None:
    run_command(parser(), arguments, plan, show)


if __name__ == "__main__":
    main()

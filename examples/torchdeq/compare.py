"""Both ported examples by every engine: losses step by step, evaluations, residuals.

    python examples/torchdeq/compare.py                 # three seeds: the table of docs/migrating/torchdeq.md
    python examples/torchdeq/compare.py --seeds 1 --steps 10

A row is the median over seeds. "evaluations" and "products" (with the transposed Jacobian) are medians
over the steps of a run, per sample, all calls of the cell counted; "residual" is the median over the steps
of the largest in the batch, at the state that the loss is taken of. "differs" is the largest relative
difference of a loss from torchdeq's at the same step, over all steps and seeds. The last row asks our
layer for the residual that torchdeq has reached.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from types import ModuleType

import language_model
import multiscale_digits
import torch
from engines import BACKWARD, ENGINES, Record

EXAMPLES: dict[str, ModuleType] = {"language": language_model, "digits": multiscale_digits}
COLUMNS = "engine          loss at 1    at 10    last  differs  evaluations  products  residual"


def differs(records: Sequence[Record], reference: Sequence[Record]) -> float:
    """Largest relative difference of two losses at the same step of the same seed."""
    return max(
        abs(mine - other) / abs(other)
        for one, another in zip(records, reference, strict=True)
        for mine, other in zip(one.losses, another.losses, strict=True)
    )


def residual(records: Sequence[Record]) -> float:
    return median(median(each.residuals) for each in records)


def row(name: str, records: Sequence[Record], reference: Sequence[Record]) -> str:
    """A line of the table."""

    def loss(step: int) -> float:
        return median(each.losses[min(step, len(each.losses) - 1)] for each in records)

    forward = median(median(each.forward) for each in records)
    backward = median(median(each.backward) for each in records)
    return (
        f"{name:14s} {loss(0):10.4f} {loss(9):8.4f} {loss(10**9):8.4f} "
        f"{100 * differs(records, reference):6.2f} % {forward:11.1f} {backward:9.1f}   "
        f"{residual(records):.1e}"
    )


def runs(example: ModuleType, seeds: int, words: list[str]) -> list[Record]:
    """One training for each seed."""
    parser = example.command_line()
    chosen = [parser.parse_args([*words, "--seed", str(seed)]) for seed in range(seeds)]
    return [example.run(options, report=0) for options in chosen]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--example", choices=EXAMPLES, nargs="+", default=list(EXAMPLES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tol", type=float, default=1e-3)
    parser.add_argument("--rate", type=float, default=1e-3)
    help_ = "torchdeq's b_solver"
    parser.add_argument("--backward", choices=BACKWARD, default="broyden", help=help_)
    options = parser.parse_args(words)
    given = ["--steps", str(options.steps), "--rate", str(options.rate)]
    given += ["--backward", options.backward]
    for title in options.example:
        print(f"{title}\n{COLUMNS}", flush=True)
        reference: list[Record] = []
        for name in (*ENGINES, "ours, as exact"):
            tol = residual(reference) if "exact" in name else options.tol
            words = [*given, "--engine", name.split(",")[0], "--tol", str(tol)]
            found = runs(EXAMPLES[title], options.seeds, words)
            reference = reference or found
            print(row(name, found, reference), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

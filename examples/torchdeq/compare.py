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

from collections.abc import Sequence
from statistics import median
from types import ModuleType
from typing import Literal, get_args

import language_model
import multiscale_digits
import torch
import tyro
from engines import Backward, Engine, Record

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


def main(
    example: tuple[Literal["language", "digits"], ...] = ("language", "digits"),
    seeds: int = 3,
    steps: int = 50,
    tol: float = 1e-3,
    rate: float = 1e-3,
    backward: Backward = "broyden",
) -> None:
    """Both ported examples by every engine; ``backward`` is torchdeq's b_solver."""
    for title in example:
        module = EXAMPLES[title]
        print(f"{title}\n{COLUMNS}", flush=True)
        reference: list[Record] = []
        for name in (*get_args(Engine), "ours, as exact"):
            asked = residual(reference) if "exact" in name else tol
            given = {"engine": name.split(",")[0], "steps": steps, "rate": rate, "tol": asked}
            options = [module.Options(**given, backward=backward, seed=s) for s in range(seeds)]
            found = [module.run(each, report=0) for each in options]
            reference = reference or found
            print(row(name, found, reference), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.cli(main)

"""What a trained layer does with fewer or more evaluations than in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.deq import DEQ
from implicit_attn.studies.budgets import returned_within
from implicit_attn.studies.measures import Measure, Pool, measure_classes
from implicit_attn.studies.tables import Table


def accuracy_by_evaluations(
    layer: DEQ,
    embed: Callable[[Tensor], Any],
    classify: Callable[[Any], Tensor],
    images: Tensor,
    labels: Tensor,
    budgets: Sequence[int],
    *,
    batch_size: int = 256,
    solver: solvers.Solver | None = None,
    measure: Measure = measure_classes,
) -> Table:
    """Accuracy, loss, residual and energy where every sample gets ``budget`` evaluations or fewer.

    The tolerance is zero, so a sample stops early only where rounding lets it get no better.

    Args:
        layer: the layer between ``embed`` and ``classify``.
        embed: images (B, ...) -> the layer's input.
        classify: equilibrium -> logits (B, classes).
        images: (N, ...), inputs of any kind; labels: (N,) int64, or what ``measure`` takes.
        budgets: evaluations per sample, each >= 1.
        batch_size: images at once.
        solver: instead of the layer's own.
        measure: of the outputs, accuracy and cross-entropy of classes by default.

    Returns:
        Rows with evaluations, accuracy, loss, median residual, and mean energy for a monitored
        layer.
    """
    if len(images) == 0:
        raise ValueError("images must hold at least one image, got none")
    pools = [Pool() for _ in budgets]
    residuals: list[list[Tensor]] = [[] for _ in budgets]
    energies: list[list[Tensor]] = [[] for _ in budgets]
    for start in range(0, len(images), batch_size):
        part = slice(start, start + batch_size)
        with torch.no_grad():
            found = returned_within(layer, embed(images[part]), budgets, solver=solver)
            for k, each in enumerate(found):
                pools[k].add(measure(classify(each.value), images[part], labels[part]))
                residuals[k].append(each.residual)
                if each.energy is not None:
                    energies[k].append(each.energy)
    table: Table = []
    for k, budget in enumerate(budgets):
        row: dict[str, Any] = {"evaluations": budget, **pools[k].means()}
        row["residual"] = torch.cat(residuals[k]).median().item()
        if energies[k]:
            row["energy"] = torch.cat(energies[k]).mean().item()
        table.append(row)
    return table


def evaluations_to_reach(
    table: Table, measure: str, level: float, *, at_most: bool = False
) -> int | None:
    """The fewest evaluations in a table with ``measure`` at least (or at most) ``level``, or None."""
    sign = -1 if at_most else 1
    enough = [row["evaluations"] for row in table if sign * row[measure] >= sign * level]
    return min(enough) if enough else None


def budgets_up_to(trained: int, factor: int = 4) -> list[int]:
    """About twenty numbers of iterations from 1 to ``factor * trained``, the multiples among them."""
    if trained < 1 or factor < 1:
        raise ValueError(f"trained and factor must be >= 1, got {trained} and {factor}")
    dense = range(1, trained + 1) if trained <= 8 else range(1, trained + 1, -(-trained // 8))
    later = range(trained, factor * trained + 1, max(1, trained // 4))
    multiples = (k * trained for k in range(1, factor + 1))
    return sorted({*dense, *later, *multiples})

"""What a trained layer does with fewer or more evaluations than in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.deq import DEQ
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
) -> Table:
    """Accuracy, residual and energy where every sample gets exactly ``budget`` evaluations or fewer.

    The tolerance is zero, so a sample stops early only where rounding lets it get no better.

    Args:
        layer: the layer between ``embed`` and ``classify``.
        embed: images (B, ...) -> the layer's input.
        classify: equilibrium -> logits (B, classes).
        images: (N, ...); labels: (N,) int64.
        budgets: evaluations per sample, each >= 1.
        batch_size: images at once.
        solver: instead of the layer's own.

    Returns:
        Rows with evaluations, accuracy, median residual, and mean energy for a monitored layer.
    """
    if len(images) == 0:
        raise ValueError("images must hold at least one image, got none")
    options: dict[str, Any] = {} if solver is None else {"solver": solver}
    table: Table = []
    for budget in budgets:
        right, residuals, energies = 0, [], []
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            with torch.no_grad():
                solution = layer.solve(
                    embed(images[part]),
                    max_steps=budget,
                    tolerance=solvers.Tolerance(rtol=0.0),
                    on_failure="ignore",
                    **options,
                )
                right += int((classify(solution.value).argmax(1) == labels[part]).sum())
            residuals.append(solution.residual)
            if solution.energy is not None:
                energies.append(solution.energy)
        row: dict[str, Any] = {
            "evaluations": budget,
            "accuracy": right / len(images),
            "residual": torch.cat(residuals).median().item(),
        }
        if energies:
            row["energy"] = torch.cat(energies).mean().item()
        table.append(row)
    return table

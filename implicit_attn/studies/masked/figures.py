"""Drawings of reconstructed patches: error against iterations, and images that fill in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from implicit_attn.studies.figures.canvas import BLUE, GREEN, GREY, ORANGE, RED, drawing
from implicit_attn.studies.tables import Table

COLORS = (BLUE, ORANGE, GREEN, RED, "#7a4fa3", "#8c6d31", "#17a2b8")
HIDDEN = (0.62, 0.74, 0.90)  # a colour that no grey image holds
HIGHEST = 1.6  # of the least error that is drawn; what is above is left to the table


def draw_errors(
    path: Path, title: str, models: Mapping[str, Sequence[Table]], fillings: Table
) -> None:
    """Error against iterations as a multiple of training's: mean and range over a model's runs.

    Args:
        models: tables of runs with ``training``, ``iterations`` and ``test_loss``, by model.
        fillings: rows of ``filling`` and ``test_loss``, drawn as lines where they are in reach.
    """
    with drawing(path, title, (8.0, 4.8)) as figure:
        axes: Any = figure.subplots()
        top = 0.0
        for color, (name, runs) in zip(COLORS, models.items(), strict=False):
            multiples = [row["iterations"] / row["training"] for row in runs[0]]
            errors = torch.tensor([[row["test_loss"] for row in run] for run in runs]).double()
            mean, low, high = errors.mean(0), errors.amin(0), errors.amax(0)
            axes.plot(multiples, mean.tolist(), "o-", color=color, label=name, markersize=4)
            axes.fill_between(multiples, low.tolist(), high.tolist(), color=color, alpha=0.2, lw=0)
            top = max(top, high[len(high) // 4 :].max().item())
        for row, style in zip(fillings, (":", "-.", "--", (0, (1, 3)), (0, (5, 1))), strict=False):
            if row["test_loss"] < HIGHEST * top:
                label = row["filling"]
                axes.axhline(row["test_loss"], color=GREY, linestyle=style, lw=1.2, label=label)
                top = max(top, row["test_loss"])
        axes.axvline(1.0, color="black", lw=0.8, alpha=0.4)
        ticks = [row["iterations"] / row["training"] for row in next(iter(models.values()))[0]]
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="iterations at test time, as a multiple of those in training")
        axes.set(ylabel="mean squared error of hidden pixels", ylim=(None, 1.08 * top))
        figure.legend(loc="outside right center", frameon=False)


def draw_filling(
    path: Path, title: str, rows: Mapping[str, Tensor], errors: Sequence[float]
) -> None:
    """Images in rows, hidden patches blue.

    Args:
        rows: images (n, C, S, S) in [0, 1] by their labels; NaN is hidden.
        errors: of all test images, of the rows from the third on, as far as they go.
    """
    columns = len(next(iter(rows.values())))
    lines = [[_paint(image) for image in images] for images in rows.values()]
    side = lines[0][0].shape[0]
    gap = max(1, side // 8)
    step = side + gap
    sheet = torch.ones(len(rows) * step - gap, columns * step - gap, 3)
    for row, line in enumerate(lines):
        for column, image in enumerate(line):
            top, left = row * step, column * step
            sheet[top : top + side, left : left + side] = image
    numbers = [None, None, *errors, *[None] * len(rows)]
    labels = [
        label if number is None else f"{label}\nerror {number:.4f}"
        for label, number in zip(rows, numbers, strict=False)
    ]
    size = (2.0 + 0.8 * columns, 0.6 + 0.8 * len(rows))
    with drawing(path, title, size, dpi=90) as figure:
        axes: Any = figure.subplots()
        axes.imshow(sheet.numpy(), interpolation="nearest")
        axes.set_yticks([row * step + (side - 1) / 2 for row in range(len(rows))], labels)
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)


def _paint(image: Tensor) -> Tensor:
    """An image (C, S, S), NaN hidden, as colours (S, S, 3)."""
    hidden = image.isnan().any(0, keepdim=True)
    shown = image.detach().cpu().float().clamp(0, 1).expand(3, -1, -1)
    color = torch.tensor(HIDDEN).view(3, 1, 1)
    return torch.where(hidden.cpu(), color, shown).permute(1, 2, 0)

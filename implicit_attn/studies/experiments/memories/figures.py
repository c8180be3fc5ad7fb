"""Figures of associative memories."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from implicit_attn.studies.experiments.memories.capacity import theoretical_load
from implicit_attn.studies.figures.canvas import BLUE, GREEN, ORANGE, RED, drawing
from implicit_attn.studies.tables import Table

COLORS = (BLUE, ORANGE, GREEN, RED)


def capacity_figure(path: str | Path, title: str, pairs: Table, dense: Table) -> None:
    """Overlap and exact share against the load; pair rules above, dense ones below."""
    with drawing(path, title, (10, 6.5)) as figure:
        panels = figure.subplots(2, 2, sharex="row", sharey=True)
        for row, table in zip(panels, (pairs, dense), strict=True):
            sites = table[0]["sites"]
            for axes, key in zip(row, ("overlap", "exact"), strict=True):
                _draw_rules(axes, table, key)
            row[0].set(title=f"N = {sites} spins: mean overlap with the pattern", ylabel="overlap")
            row[1].set(title=f"N = {sites} spins: share of exact retrievals", ylabel="share")
            row[1].axhline(0.5, color="black", linewidth=0.6, linestyle=":")
            row[0].legend(fontsize=8, loc="lower left")
            _explain_full_memory(row[0], table)
            for axes in row:
                axes.set(xlabel="load P / N", ylim=(-0.03, 1.05))


def _draw_rules(axes: Any, table: Table, key: str) -> None:
    largest = max(row["load"] for row in table)
    axes.set_xscale("log")
    for color, rule in zip(COLORS, dict.fromkeys(row["rule"] for row in table), strict=False):
        rows = [row for row in table if row["rule"] == rule]
        loads = [row["load"] for row in rows]
        low, high = ([row[f"{key}_{end}"] for row in rows] for end in ("low", "high"))
        axes.fill_between(loads, low, high, color=color, alpha=0.2, linewidth=0)
        name = f"power {rule}" if isinstance(rule, int) else rule
        theory = theoretical_load(rule, rows[0]["sites"])
        if theory <= largest:
            axes.axvline(theory, color=color, linewidth=1, linestyle="--")
            place = theory, 0.62 if theory < largest else 0.2  # the right edge is full above
            note = axes.annotate("theory", place, (-4, 0), textcoords="offset points")
            note.set(fontsize=7, color=color, rotation=90, ha="right", va="center")
            name += f" (theory: {theory:.3g})"
        elif theory > largest:
            name += f" (theory: {theory:.2g})"
        axes.plot(loads, [row[key] for row in rows], color=color, marker="o", ms=3.5, label=name)


def _explain_full_memory(axes: Any, table: Table) -> None:
    """Says why the overlap of the pseudo-inverse rises again at P = N."""
    for row in table:
        if row["rule"] == "pseudo-inverse" and row["patterns"] == row["sites"]:
            axes.annotate(
                "P = N:\nJ = 0, no\nspin moves",
                (row["load"], row["overlap"]),
                (-5, 8),
                textcoords="offset points",
                fontsize=7,
                ha="right",
            )


def kinds_figure(
    path: str | Path, title: str, panels: Mapping[str, tuple[Table, tuple[int, ...]]]
) -> None:
    """Histograms of the effective number of patterns against beta; ``panels`` maps a heading to its
    table and the sizes that are marked."""
    with drawing(path, title, (6 * len(panels), 5)) as figure:
        mesh = None
        every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (heading, (table, sizes)) in zip(every, panels.items(), strict=True):
            betas = list(dict.fromkeys(row["beta"] for row in table))
            most = max(sizes)
            edges = centred_edges(sizes)
            columns = []
            for beta in betas:
                numbers = torch.tensor([row["effective"] for row in table if row["beta"] == beta])
                counts = torch.histogram(numbers.float(), edges.float()).hist
                columns.append(100 * counts / len(numbers))
            image = torch.stack(columns, dim=1)
            shown = image.masked_fill(image == 0, torch.nan)
            mesh = axes.pcolormesh(
                _borders(betas), edges.numpy(), shown.numpy(), vmin=0, vmax=100, cmap="viridis_r"
            )
            meanings = ("one pattern", "a whole cluster")[: len(sizes) - 1]
            for size, meaning in zip(sizes, (*meanings, "all patterns"), strict=True):
                axes.axhline(size, color="black", linewidth=0.7, linestyle=":")
                right, above = size < most, size < most
                axes.annotate(
                    meaning,
                    (0.02 if right else 0.98, size),
                    (0, 3 if above else -3),
                    xycoords=("axes fraction", "data"),
                    textcoords="offset points",
                    ha="left" if right else "right",
                    va="bottom" if above else "top",
                    fontsize=8,
                )
            axes.set(xscale="log", yscale="log", xlabel="inverse temperature beta")
            axes.set_title(heading, fontsize=10)
            axes.set_yticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
        every[0].set_ylabel("effective number of patterns at the fixed point")
        figure.colorbar(mesh, ax=list(every), label="share of the starts, %")


def centred_edges(sizes: tuple[int, ...]) -> torch.Tensor:
    """Edges of bins, equal on a logarithmic scale, in the middle of whose bins the sizes lie: the first
    is 1, the last the largest; of 40 to 60 steps between them the number that fits the others best."""
    most = max(*sizes, 2)

    def misfit(steps: int) -> float:
        places = [steps * math.log(size) / math.log(most) for size in sizes]
        return max(abs(place - round(place)) for place in places)

    steps = min(range(40, 61), key=misfit)
    half = 0.5 / steps
    return torch.tensor(most, dtype=torch.float64) ** torch.linspace(-half, 1 + half, steps + 2)


def _borders(values: list[float]) -> list[float]:
    """Edges between values in geometric order."""
    ratios = [after / before for before, after in itertools.pairwise(values)] or [2.0]
    ends = [values[0] / ratios[0] ** 0.5, values[-1] * ratios[-1] ** 0.5]
    middles = [(before * after) ** 0.5 for before, after in itertools.pairwise(values)]
    return [ends[0], *middles, ends[1]]

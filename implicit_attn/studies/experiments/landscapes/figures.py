"""Figures of landscapes: queries on their way down, and the norm of one step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from implicit_attn.studies.experiments.landscapes.descents import Landscape
from implicit_attn.studies.figures.canvas import BLUE, GREEN, ORANGE, RED, drawing
from implicit_attn.studies.tables import Table

YELLOW = "#f2c230"
LEVELS = 22  # of the contours


def landscapes_figure(path: str | Path, title: str, found: Sequence[Landscape]) -> None:
    """A panel for each landscape, and one legend in the place after the last."""
    columns = 4
    rows = -(-(len(found) + 1) // columns)
    with drawing(path, title, (4.1 * columns, 4.2 * rows), dpi=80) as figure:
        panels = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, landscape in zip(panels, found, strict=False):
            draw_landscape(axes, landscape)
        for axes in panels[len(found) :]:
            axes.set_axis_off()
        _draw_legend(panels[len(found)])


def draw_landscape(axes: Any, landscape: Landscape) -> None:
    """The energy as filled contours, and what stands and moves on it."""
    picture, grid = landscape.picture, landscape.grid.numpy()
    # The root brings out the bottom, which a quadratic rim would leave in one colour.
    height = landscape.surface - landscape.surface.min()
    shade = (height / height.max()).sqrt().numpy()
    axes.contourf(*grid, shade, levels=LEVELS, cmap="Greys_r", vmin=-0.8, vmax=1, zorder=0)
    path, start, end = landscape.states, landscape.states[0], landscape.states[-1]
    for before, after in pairwise(path):
        _arrows(axes, before, after, RED)
    if landscape.values is not None:
        _arrows(axes, end, landscape.values, YELLOW)
        axes.plot(*landscape.values.T, ".", color=YELLOW, markersize=5, zorder=5)
    if picture.keys != "states":
        axes.plot(*landscape.keys.T, "o", **_PATTERNS)
    axes.plot(*start.T, "o", **_STATES)
    axes.plot(*end.T, "x", **_UPDATED)
    steps = f"{picture.steps} step" + "s" * (picture.steps > 1)
    settings = f"β√2 = {picture.scale:g}, η = {picture.step_size:g}, {steps}"
    axes.set_title(picture.name, fontsize=12)
    axes.set_xlabel(f"{settings}:\n{picture.meaning}", fontsize=10)
    axes.set(aspect="equal", xticks=[], yticks=[])


_PATTERNS = {
    "color": BLUE,
    "fillstyle": "none",
    "markersize": 6,
    "markeredgewidth": 1.3,
    "zorder": 3,
}
_STATES = {"color": RED, "markersize": 4.5, "zorder": 4}
_UPDATED = {"color": "black", "markersize": 6, "markeredgewidth": 1.8, "zorder": 6}


def _arrows(axes: Any, before: torch.Tensor, after: torch.Tensor, color: str) -> None:
    axes.quiver(
        *before.T,
        *(after - before).T,
        angles="xy",
        scale_units="xy",
        scale=1,
        color=color,
        alpha=0.8,
        width=0.004,
        headwidth=4,
        zorder=2,
    )


def _draw_legend(axes: Any) -> None:
    """What is drawn in every panel, in words."""
    axes.plot([], [], "o", label="stored patterns, the keys", **_PATTERNS)
    axes.plot([], [], "o", label="states before, the queries", **_STATES)
    axes.plot([], [], "x", label="states after the steps", **_UPDATED)
    axes.plot([], [], color=RED, label="a step down the energy")
    axes.plot([], [], color=YELLOW, label="from there to what attention\nreturns with values")
    axes.legend(loc="upper left", fontsize=11, frameon=False)
    axes.text(
        0.03,
        0.3,
        "Background: the energy of a query (its\n"
        "root above the minimum), dark is low.\n\n"
        "$E(q) = |q|^2 / 2 - β^{-1} \\log \\sum_j e^{β q·k_j}$\n\n"
        "$q ← q - η\\, ∇E(q)$; with η = 1 this is\n"
        "softmax attention.",
        fontsize=11,
        va="center",
        transform=axes.transAxes,
    )


def norms_figure(path: str | Path, title: str, table: Table) -> None:
    """The norm of the step over dimension and scale in logarithmic colours, and some of its rows."""
    with drawing(path, title, (13, 5)) as figure:
        axes = figure.subplots(1, 2, width_ratios=[1.25, 1])
        draw_norm_map(axes[0], table)
        draw_norm_rows(axes[1], table)


def draw_norm_map(axes: Any, table: Table) -> None:
    """Medians of the draws; lines at d = 2, d = 512 and c = 1."""
    dimensions = sorted({row["dimension"] for row in table})
    scales = sorted({row["scale"] for row in table})
    norms = {(row["dimension"], row["scale"]): row["norm"] for row in table}
    image = torch.tensor([[norms[d, c] for d in dimensions] for c in scales])
    exponents = image.clamp(1e-8, 1e2).log10().numpy()
    mesh = axes.pcolormesh(dimensions, scales, exponents, vmin=-8, vmax=2, shading="nearest")
    axes.set_xscale("log", base=2)
    axes.axhline(1, color=RED, linewidth=1.2, linestyle="--")
    for dim in (2, 512):
        axes.axvline(dim, color=RED, linewidth=1.4, linestyle=":")
    axes.set(xlabel="dimension d of a token", ylabel="scale c, β = c / √d")
    axes.set_title("median of the draws (lines: d = 2, d = 512, c = 1)", fontsize=11)
    axes.figure.colorbar(mesh, ax=axes, label="log10 of the norm, cut off at -8")


def draw_norm_rows(axes: Any, table: Table) -> None:
    """Median and range of the draws against the dimension, with the formula for large d."""
    scales = sorted({row["scale"] for row in table})
    chosen = {min(scales, key=lambda c: abs(c - wanted)): None for wanted in (0.2, 1.0, 2.0)}
    for scale, color in zip(chosen, (GREEN, BLUE, ORANGE), strict=False):
        rows = [row for row in table if row["scale"] == scale]
        dimensions = [row["dimension"] for row in rows]
        low, high = ([row[key] for row in rows] for key in ("smallest", "largest"))
        axes.fill_between(dimensions, low, high, color=color, alpha=0.2, linewidth=0)
        axes.plot(dimensions, [row["norm"] for row in rows], color=color, label=f"c = {scale:.2g}")
        large = [row for row in rows if scale * row["dimension"] ** 0.5 >= max(3, 4 * scale**2)]
        places, expected = ([row[key] for row in large] for key in ("dimension", "expected"))
        axes.plot(places, expected, color=color, linestyle="--", linewidth=1)
    axes.plot([], [], color="black", linestyle="--", linewidth=1, label="r.m.s. for large d")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="dimension d of a token", ylabel="norm of the step")
    axes.set_title("median and range of the draws", fontsize=11)
    axes.legend(fontsize=9)

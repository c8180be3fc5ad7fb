"""Figures of spins: ratios of Bessel functions, norms of means, graphs of couplings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from implicit_attn.optional import require
from implicit_attn.studies.experiments.landscapes.spins import SpinPicture
from implicit_attn.studies.figures.canvas import BLUE, GREEN, GREY, ORANGE, RED, drawing
from implicit_attn.studies.tables import Table

COLORS = (GREY, BLUE, GREEN, ORANGE, RED)


def spin_figure(
    path: str | Path,
    title: str,
    *,
    ratios: Table,
    norms: Table,
    edges: Table,
    sites: int,
    share: float,
    picture: SpinPicture,
    pairs: Table,
    dim: int,
) -> None:
    """Four panels: the Bessel ratio, the norm of the mean, a directed graph and a few spins."""
    with drawing(path, title, (12, 10.5), dpi=90) as figure:
        axes = figure.subplots(2, 2)
        draw_ratios(axes[0, 0], ratios)
        draw_norms(axes[0, 1], norms, dim)
        draw_directed_graph(axes[1, 0], edges, sites, share)
        draw_spins(axes[1, 1], picture, pairs)


def draw_ratios(axes: Any, table: Table) -> None:
    """The exact ratio as dots on the lines of its limit, against the order."""
    styles = {"sqrt(nu)": (BLUE, "√ν"), "nu": (ORANGE, "ν"), "nu^2": (GREEN, "ν²")}
    for at, (color, label) in styles.items():
        rows = [row for row in table if row["at"] == at]
        orders = [row["order"] for row in rows]
        axes.plot(orders, [row["limit"] for row in rows], color=color, label=f"limit, x = {label}")
        axes.plot(orders, [row["ratio"] for row in rows], "o", color=color, ms=5, label="exact")
    for row in table:
        if row["at"] == "nu" and row["order"] in (1, 8, 64, 512):
            note, low = f"{row['relative_error']:.2g}", row["order"] == 1
            place, away = (row["order"], row["ratio"]), (0, -20) if low else (0, -14)
            note += "\n(all three, x = 1)" if low else ""
            axes.annotate(note, place, away, textcoords="offset points", fontsize=8, ha="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row["order"] for row in table})[::2])
    axes.set(xlabel="order ν", ylabel="ratio", xlim=(0.45, 900), ylim=(0, 1.05))
    axes.set_title(
        "Bessel ratio $I_{ν+1}(x) / I_ν(x)$ and its limit for large ν\n"
        "(numbers: relative error of the limit at x = ν)",
        fontsize=11,
    )
    axes.legend(fontsize=8, ncols=3, loc="center right", bbox_to_anchor=(1, 0.66))


def draw_norms(axes: Any, table: Table, dim: int) -> None:
    """The norm of a spin's mean against the field for each inverse temperature."""
    betas = sorted({row["beta"] for row in table})
    for beta, color in zip(betas, COLORS, strict=False):
        rows = [row for row in table if row["beta"] == beta]
        fields = [row["field"] for row in rows]
        axes.plot(fields, [row["norm"] for row in rows], color=color, label=f"β = {beta:g}")
        few = rows[:: max(1, len(rows) // 10)]
        places, exact = [row["field"] for row in few], [row["exact"] for row in few]
        axes.plot(places, exact, "o", color=color, markersize=3.5)
    radius = math.sqrt(dim / 2 - 1)
    axes.axhline(radius, color="black", linestyle="--", linewidth=1, label=f"R = {radius:.1f}")
    axes.set(xlabel="length of the field |h|", ylabel="length of the mean |⟨S⟩|")
    axes.set_title(
        f"A spin of length R in {dim} dimensions turns into its field\n"
        "(lines: limit for large d, dots: exact)",
        fontsize=11,
    )
    axes.legend(fontsize=8, ncols=2, loc="center right", bbox_to_anchor=(1, 0.28))


def draw_directed_graph(axes: Any, table: Table, sites: int, share: float) -> None:
    """Sites on a circle; edges bend to the left of their way, so that both ways are seen."""
    collections: Any = require("matplotlib.collections", extra="examples")
    places = _circle(sites)
    largest = max(abs(row["coupling"]) for row in table)
    lines, colors, widths = [], [], []
    time = np.linspace(0, 1, 15)[:, None]
    for row in table:
        start, end = places[row["from"]], places[row["to"]]
        across = np.array([start[1] - end[1], end[0] - start[0]])
        middle = (start + end) / 2 + 0.15 * across
        lines.append((1 - time) ** 2 * start + 2 * time * (1 - time) * middle + time**2 * end)
        colors.append(RED if row["coupling"] > 0 else BLUE)
        widths.append(1.5 * (abs(row["coupling"]) / largest) ** 2)
    drawn = collections.LineCollection(lines, colors=colors, linewidths=widths)
    drawn.set_antialiased(False)  # half the size of the file
    axes.add_collection(drawn)
    axes.plot(*places.T, "o", color="black", markersize=4)
    _show_signs(axes, 1.5)
    _frame(axes, f"Random directed couplings of {sites} sites, $J_{{ij}}$ from N(0, 1/N)")
    axes.text(
        0, -1.22, f"the strongest {share:.0%}; an edge bends to the left of its way", ha="center"
    )


def draw_spins(axes: Any, picture: SpinPicture, table: Table) -> None:
    """Mean spins as arrows at their sites, with the strongest couplings between them."""
    places = _circle(len(picture.means))
    largest = max(abs(row["coupling"]) for row in table)
    for row in table:
        ends = places[[row["from"], row["to"]]]
        color, width = RED if row["coupling"] > 0 else BLUE, 4 * abs(row["coupling"]) / largest
        axes.plot(*ends.T, color=color, linewidth=width, alpha=0.7, zorder=1)
    axes.plot(*places.T, "o", color="white", markeredgecolor="black", markersize=12, zorder=2)
    for vectors, color, label in (
        (picture.fields / picture.fields.norm(dim=1).max(), GREY, "field x"),
        (picture.means, "black", "mean spin m"),
    ):
        arrows = 0.36 * np.asarray(vectors)
        axes.quiver(
            *places.T,
            *arrows.T,
            angles="xy",
            scale_units="xy",
            scale=1,
            color=color,
            width=0.008,
            zorder=3,
            label=label,
        )
    _show_signs(axes, 3)
    count = len(picture.means)
    _frame(axes, f"{count} planar spins at their mean-field solution")
    text = f"lines: the {len(table)} strongest of {count * (count - 1) // 2} couplings"
    axes.text(0, -1.42, text, ha="center")
    axes.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5))


def _circle(count: int) -> Any:
    angles = 2 * math.pi * np.arange(count) / count + math.pi / 2
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _show_signs(axes: Any, width: float) -> None:
    """Entries of the legend for the colours of the signs."""
    for color, label in ((RED, "J > 0"), (BLUE, "J < 0")):
        axes.plot([], [], color=color, linewidth=width, label=label)


def _frame(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set(xticks=[], yticks=[], xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    axes.legend(fontsize=8, loc="upper right")
    for side in axes.spines.values():
        side.set_visible(False)

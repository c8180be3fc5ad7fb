"""Figures of descents on a fixed energy, and of learning by local rules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from implicit_attn.studies.experiments.optimisers.local_digits import BACKWARD, FIXED, LOCAL
from implicit_attn.studies.figures.canvas import BLUE, GREEN, GREY, ORANGE, RED, drawing
from implicit_attn.studies.tables import Table

FAMILIES = {"Newton": BLUE, "plain": "black", "Nesterov": GREEN, "momentum": RED}
STYLES = ("-", "--", ":", "-.")
COLORS = {FIXED: GREY, LOCAL: RED, BACKWARD: BLUE}


def descent_figure(
    path: str | Path, title: str, methods: Table, curves: Table, bound: float
) -> None:
    """The gradient after each step, and the steps that each method takes."""
    with drawing(path, title, (13.5, 5.6), dpi=90) as figure:
        axes = figure.subplots(1, 2, width_ratios=[1.35, 1])
        names = [row["method"] for row in methods]
        styles = {name: _style(name, names) for name in names}
        draw_curves(axes[0], curves, styles, bound)
        draw_steps(axes[1], methods, styles, bound)
        lines, labels = axes[0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9)


def draw_curves(axes: Any, curves: Table, styles: dict[str, Any], bound: float) -> None:
    """Median norms of the first keys; steps on a logarithmic axis, where 4 and 400 are both seen."""
    for name, style in styles.items():
        rows = [row for row in curves if row["method"] == name and row["step"] >= 1]
        norms = [max(row["norm"], 1e-16) for row in rows]
        end = next((i for i, norm in enumerate(norms) if norm < bound / 100), len(norms) - 1) + 1
        axes.plot([row["step"] for row in rows[:end]], norms[:end], label=name, **style)
    axes.axhline(bound, color=GREY, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bound / 30, 5)
    axes.set(xlabel="step", ylabel="norm of the gradient (median of the starts)")
    axes.set_title("first draw of keys", fontsize=11)


def draw_steps(axes: Any, methods: Table, styles: dict[str, Any], bound: float) -> None:
    """Steps to the bound: range and median over all draws, and the first draw's median."""
    for place, row in enumerate(reversed(methods)):
        color = styles[row["method"]]["color"]
        reached = math.isfinite(row["all_most"])
        ends = [row["all_least"], row["all_most"] if reached else 1e4]
        axes.plot(ends, [place, place], color=color, linewidth=5, alpha=0.3)
        if not reached:
            axes.plot(1e4, place, ">", color=color, markersize=8)
        axes.plot(row["all_median"], place, "|", color=color, markersize=14, markeredgewidth=2)
        axes.plot(row["steps"], place, "o", color=color, markersize=5)
    axes.set_xscale("log")
    axes.set_yticks(range(len(methods)), [row["method"] for row in reversed(methods)])
    axes.set(xlabel=f"steps to a gradient of {bound:g}")
    axes.set_title("bar: all draws (arrow: not all end), |: median, dot: first draw", fontsize=11)
    axes.grid(axis="x", alpha=0.3)


def _style(name: str, names: list[str]) -> dict[str, Any]:
    """One colour a family; tuned ones thick, the others by line style in their order."""
    family = next(each for each in FAMILIES if name.startswith(each))
    tuned = "tuned" in name
    members = [each for each in names if each.startswith(family) and "tuned" not in each]
    line = "-." if tuned else STYLES[members.index(name) % len(STYLES)]
    return {"color": FAMILIES[family], "linestyle": line, "linewidth": 2.4 if tuned else 1.5}


def learning_figure(
    path: str | Path,
    title: str,
    digits: Table,
    text: Table,
    floors: tuple[float, float],
    bars: dict[str, float],
    name: str,
) -> None:
    """Free energy, spread of the states and what was learned: digits above, text below."""
    with drawing(path, title, (13, 7.4), dpi=90) as figure:
        axes = figure.subplots(2, 3)
        for row, (table, step, unit, floor) in enumerate(
            ((digits, "epoch", "epoch", floors[0]), (text, "step", "step", floors[1]))
        ):
            for column, key in enumerate(("free_energy", "spread", "")):
                measure = key or ("test_accuracy", "loss")[row]
                _draw_rules(axes[row, column], table, step, measure)
                axes[row, column].set_xlabel(unit)
            axes[row, 0].axhline(floor, color=GREY, linestyle=":", label="lower bound")
            axes[row, 0].set_title(f"{('digits', name)[row]}: mean free energy")
            axes[row, 1].set_title("spread of the states")
        lines, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside lower center", ncols=4, frameon=False)
        axes[0, 1].set_yscale("log")
        axes[0, 2].axhline(0.1, color=GREY, linestyle=":")
        axes[0, 2].set(title="test accuracy (dotted: chance)", ylim=(0, 1))
        axes[1, 2].set_title("validation loss, nats a symbol")
        styles = zip((":", "--"), bars.values(), strict=True)
        bounds = [
            axes[1, 2].axhline(value, color=ORANGE, linestyle=style) for style, value in styles
        ]
        axes[1, 2].legend(bounds, list(bars), fontsize=9, loc="upper right")
        # The untrained start would hide the differences at the end.
        trained = [row["loss"] for row in text if row["step"] > 0]
        heights = [*trained, *bars.values()]
        axes[1, 2].set_ylim(min(heights) - 0.1, max(heights) + 0.3)


def _draw_rules(axes: Any, table: Table, step: str, measure: str) -> None:
    for rule, color in COLORS.items():
        rows = [row for row in table if row["rule"] == rule]
        places = [row[step] for row in rows]
        axes.plot(places, [row[measure] for row in rows], color=color, label=rule, linewidth=1.8)

"""Figures of associative memories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from implicit_attn.studies.experiments.memories.capacity import theoretical_load
from implicit_attn.studies.figures.canvas import BLUE, GREEN, ORANGE, RED, drawing
from implicit_attn.studies.tables import Table

COLORS = (BLUE, ORANGE, GREEN, RED)


def capacity_figure(path: str | Path, title: str, pairs: Table, dense: Table) -> None:
    """Overlap and exact share against the load; pair rules above, dense ones below."""
    with drawing(path, title, (11, 7.5)) as figure:
        panels = figure.subplots(2, 2, sharex="row", sharey=True)
        for row, table in zip(panels, (pairs, dense), strict=True):
            sites = table[0]["sites"]
            for axes, key in zip(row, ("overlap", "exact"), strict=True):
                _draw_rules(axes, table, key)
            row[0].set(title=f"N = {sites} spins: mean overlap with the pattern", ylabel="overlap")
            row[1].set(title=f"N = {sites} spins: share of exact retrievals", ylabel="share")
            row[1].axhline(0.5, color="black", linewidth=0.6, linestyle=":")
            row[0].legend(fontsize=8, loc="lower left")
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
            name += f" (theory, dashed: {theory:.3g})"
        elif theory > largest:
            name += f" (theory: {theory:.2g})"
        axes.plot(loads, [row[key] for row in rows], color=color, marker="o", ms=3.5, label=name)

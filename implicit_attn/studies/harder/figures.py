"""Panels of easy-to-hard studies: a mean over seeds with the range of them, against any number."""

from __future__ import annotations

from typing import Any

from implicit_attn.studies.harder.seeds import over_seeds
from implicit_attn.studies.tables import Table


def draw_seeds(
    axes: Any, rows: Table, against: str, measure: str, color: str, label: str, **line: Any
) -> None:
    """The mean of column ``measure`` over the seeds against column ``against``, and their range.

    Args:
        axes: a panel.
        rows: of every seed; those with one value of ``against`` are taken together.
        color, label, line: of the line.
    """
    merged = sorted(over_seeds(rows, [against], [measure]), key=lambda row: row[against])
    merged = [row for row in merged if row[measure] is not None]
    places = [row[against] for row in merged]
    low, high = ([row[f"{measure}_{end}"] for row in merged] for end in ("least", "most"))
    axes.fill_between(places, low, high, color=color, alpha=0.18, linewidth=0)
    axes.plot(places, [row[measure] for row in merged], color=color, label=label, **line)


def mark_training(axes: Any, iterations: float, budgets: list[int]) -> None:
    """Powers of two of the iterations of training along the axis, with 1x as a dotted line."""
    axes.set_xscale("log", base=2)
    names = [f"{budget}\n{_multiple(budget / iterations)}" for budget in budgets]
    axes.set_xticks(budgets, names)
    axes.axvline(iterations, color="black", linestyle=":", linewidth=1)


def _multiple(factor: float) -> str:
    return f"{factor:.3g}x" if factor >= 1 else f"1/{1 / factor:.3g}x"

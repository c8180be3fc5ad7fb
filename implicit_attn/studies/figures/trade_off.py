"""The figure of the trade-off study: the same depth made of layers or of iterations."""

from __future__ import annotations

from pathlib import Path

from implicit_attn.studies.figures.canvas import BLUE, GREEN, ORANGE, drawing
from implicit_attn.studies.tables import Table


def seed_means(table: Table) -> Table:
    """A row for each (layers, iterations): the mean over the seeds, fewest layers first."""
    means: Table = []
    for layers, iterations in sorted({(row["layers"], row["iterations"]) for row in table}):
        group = [r for r in table if (r["layers"], r["iterations"]) == (layers, iterations)]
        row = {"layers": layers, "iterations": iterations, "parameters": group[0]["parameters"]}
        row["seeds"] = len(group)
        for key in ("accuracy", "loss"):
            row[key] = sum(each[key] for each in group) / len(group)
        means.append(row)
    return means


def trade_off_figure(path: str | Path, title: str, table: Table) -> None:
    """Three panels over (layers, iterations): accuracy, loss, parameters; points are seeds."""
    means = seed_means(table)
    pairs = [(row["layers"], row["iterations"]) for row in means]
    label = "mean of the seeds" if any(row["seeds"] > 1 for row in means) else "one seed"
    with drawing(path, title, (15, 4.6)) as figure:
        axes = figure.subplots(1, 3)
        for panel, key, factor, color in (
            (axes[0], "accuracy", 100, ORANGE),
            (axes[1], "loss", 1, BLUE),
        ):
            places = [pairs.index((row["layers"], row["iterations"])) for row in table]
            panel.plot(places, [factor * row[key] for row in table], "o", color=color, alpha=0.5)
            panel.plot([factor * row[key] for row in means], color=color, label=label)
            panel.legend(frameon=False)
        axes[0].set(ylabel="test accuracy, %", title="Accuracy at constant depth")
        axes[1].set(ylabel="test loss (cross-entropy)", title="Loss at constant depth")
        thousands = [row["parameters"] / 1000 for row in means]
        axes[2].bar_label(axes[2].bar(range(len(pairs)), thousands, color=GREEN), fmt="%.1f")
        axes[2].set(ylabel="parameters, thousands", title="Number of parameters")
        names = [f"{layers} x {iterations}" for layers, iterations in pairs]
        for panel in axes:
            panel.set_xticks(range(len(pairs)), names)
            panel.set_xlabel("layers x iterations of each")

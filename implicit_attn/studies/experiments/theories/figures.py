"""Figures of mean-field theories and samplers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from implicit_attn.studies.figures.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    drawing,
    legend_below,
)
from implicit_attn.studies.figures.spins import LOG_PARTITIONS, ORDER_MEANS, draw_errors
from implicit_attn.studies.tables import Table

GRAPH_COLOURS = {"er-kron": RED, "er-general": ORANGE, "tree": GREEN, "ring4": BLUE}
FLOOR = 0.1  # standard errors, drawn in place of less


def free_energy_figure(path: str | Path, title: str, tables: Mapping[str, Table]) -> None:
    """Errors of log Z and of the means against the strength of the couplings, a row for each family."""
    with drawing(path, title, (10.5, 1.4 + 3.4 * len(tables))) as figure:
        axes = figure.subplots(len(tables), 2, squeeze=False, sharex="col")
        for (logs, means), (name, table) in zip(axes, tables.items(), strict=True):
            draw_errors(logs, table, LOG_PARTITIONS)
            logs.set(ylabel=f"{name}\n\n$|\\log Z - $ exact$|$", title="Free energy of the model")
            draw_errors(means, table, ORDER_MEANS)
            means.set(ylabel="relative error", title="Means $\\langle S_i\\rangle$")
        for panel in axes[-1]:
            panel.set_xlabel("strength s of the couplings")
        legend_below(figure, axes[0, 0])


def mixing_figure(path: str | Path, title: str, table: Table, allowed: float) -> None:
    """How far the mean energy is from that of the longest run, in standard errors."""
    with drawing(path, title, (7.5, 4.8)) as figure:
        axes = figure.subplots()
        for graph, color in GRAPH_COLOURS.items():
            rows = [row for row in table if row["graph"] == graph][:-1]
            if not rows:
                continue
            sweeps = [row["sweeps"] for row in rows]
            apart = [max(row["apart"], FLOOR) for row in rows]
            first = next((row["sweeps"] for row in rows if row["mixed"]), None)
            when = "not mixed" if first is None else f"mixed after {first}"
            axes.plot(sweeps, apart, "o-", color=color, label=f"{graph}: {when}", markersize=4)
        axes.axhspan(FLOOR / 2, allowed, color=GREY, alpha=0.15, linewidth=0)
        axes.text(0.02, 0.03, "noise: chains have mixed", color=GREY, transform=axes.transAxes)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(bottom=FLOOR / 2)
        axes.set(
            xlabel="sweeps from independent colours",
            ylabel="mean energy: distance from the last,\nin standard errors",
        )
        axes.legend(frameon=False)

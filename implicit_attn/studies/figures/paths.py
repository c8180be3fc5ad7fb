"""The figure of the paths study: how far apart the ends from several starts are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from implicit_attn.studies.figures.canvas import BLUE, GREY, ORANGE, drawing
from implicit_attn.studies.paths import SAME
from implicit_attn.studies.tables import Table

SMALLEST = 1e-12  # smaller distances are drawn here: a logarithmic axis has no zero


def paths_figure(path: str | Path, title: str, runs: dict[str, tuple[Table, Table]]) -> None:
    """A row of panels for each run: distances of the ends, and agreement of the predictions."""
    with drawing(path, title, (12, 0.8 + 3.9 * len(runs))) as figure:
        axes = figure.subplots(len(runs), 2, squeeze=False)
        for row, (name, (summary, samples)) in zip(axes, runs.items(), strict=True):
            _draw_distances(row[0], name, samples)
            _draw_agreement(row[1], name, summary)


def _draw_distances(axes: Any, name: str, samples: Table) -> None:
    """The cumulative distribution over the samples, a curve for each start."""
    reference = samples[0]["start"]
    distances: dict[str, list[float]] = {}
    for row in samples:
        if row["start"] != reference:
            distances.setdefault(row["start"], []).append(max(row["distance"], SMALLEST))
    for start, values in distances.items():
        values.sort()
        share = [100 * (k + 1) / len(values) for k in range(len(values))]
        axes.step([values[0], *values], [0.0, *share], where="post", label=f"from {start}")
    axes.axvline(SAME, color=GREY, linestyle=":", label="counted as the same point")
    least = min(values[0] for values in distances.values())
    largest = max(values[-1] for values in distances.values())
    axes.set(
        xlabel=f"relative distance to the end from {reference}",
        ylabel="share of samples up to there, %",
        xscale="log",
        xlim=(min(1e-3, 0.5 * least), max(10.0, 2 * largest)),
        title=f"Distance of the ends: {name}",
    )
    axes.legend(frameon=False)


def _draw_agreement(axes: Any, name: str, summary: Table) -> None:
    starts = [row["start"] for row in summary]
    for shift, key, label, color in (
        (-0.2, "agreement", f"same prediction as from {starts[0]}", BLUE),
        (0.2, "accuracy", "accuracy", ORANGE),
    ):
        places = [k + shift for k in range(len(starts))]
        shares = [100 * row[key] for row in summary]
        bars = axes.bar(places, shares, width=0.38, color=color, label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(starts)), [f"from {start}" for start in starts])
    axes.set(ylabel="share of samples, %", title=f"Predictions: {name}", ylim=(0, 118))
    axes.legend(frameon=False, loc="upper right", ncols=2)

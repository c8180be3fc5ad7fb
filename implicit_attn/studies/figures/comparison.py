"""The figure of the comparison: accuracy, robustness, and what tells mistakes and foreign images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from implicit_attn.studies.figures.canvas import BLUE, GREEN, GREY, ORANGE, RED, drawing
from implicit_attn.studies.tables import Table

LABELS = {
    "noise": "deviation of Gaussian noise on pixels in [0, 1]",
    "occlusion": "side of the hidden square, share of the image's",
}
# Of the model, and of the one that it is compared with; other signals are in the table alone.
MARKS = {
    "energy": ("o", BLUE),
    "profile": ("s", GREEN),
    "softmax": ("D", ORANGE),
    "features": ("^", RED),
}
CROSSES = {"softmax": "x", "features": "+"}
SAID = {
    "softmax": "1 - largest softmax",
    "energy": "energy at the equilibrium",
    "profile": "distance of energy, residual, curvature",
    "features": "distance of features",
}


def comparison_figure(
    path: str | Path, title: str, name: str, table: Table, harmed: Table, trust: Table
) -> None:
    """Four panels: accuracies, noise, occlusion, and AUROC of the signals of confidence.

    Args:
        path, title: of the figure, a PNG.
        name: of the model that is compared with the others.
        table, harmed, trust: of ``comparison``, ``robustness`` and ``confidence``.
    """
    with drawing(path, title, (13, 9), dpi=120) as figure:
        axes = figure.subplots(2, 2)
        _draw_accuracies(axes[0, 0], table, name)
        for panel, harm in ((axes[0, 1], "noise"), (axes[1, 1], "occlusion")):
            _draw_harm(panel, [row for row in harmed if row["harm"] == harm], harm, name)
        _draw_confidence(axes[1, 0], trust, name)


def _draw_accuracies(axes: Any, table: Table, name: str) -> None:
    """Errors rather than accuracies: bars that start at zero show their ratio."""
    errors = [100 * (1 - row["accuracy"]) for row in table]
    colors = [ORANGE if row["model"] == name else GREY for row in table]
    bars = axes.barh(range(len(table)), errors, color=colors, height=0.6)
    notes = [
        f"{100 * row['accuracy']:.1f} % right, {row['parameters']:,} parameters, {row['seconds']:.2g} s"
        for row in table
    ]
    axes.bar_label(bars, notes, padding=4, fontsize=8)
    axes.set_yticks(range(len(table)), [row["model"] for row in table])
    axes.invert_yaxis()
    axes.set_xlim(0, 2.2 * max(*errors, 0.1))
    axes.set(xlabel="test images classified wrongly, %", title="Models on the same images")


def _draw_harm(axes: Any, rows: Table, harm: str, name: str) -> None:
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        color, marker = (ORANGE, "o") if model == name else (GREY, "s")
        accuracy = [100 * row["accuracy"] for row in own]
        look: Any = {"color": color, "marker": marker, "markersize": 4, "label": model}
        axes.plot([row["strength"] for row in own], accuracy, **look)
    axes.set(xlabel=LABELS.get(harm, harm), ylabel="accuracy, %", title=f"Robustness to {harm}")
    axes.legend(frameon=False, loc="lower left")


def _draw_confidence(axes: Any, trust: Table, name: str) -> None:
    """A row a task; a mark for each signal of the model, crosses for the other models' softmax."""
    tasks = list(dict.fromkeys(row["task"] for row in trust))
    shown: dict[str, Any] = {}
    for row in trust:
        signal, own = row["signal"], row["model"] == name
        if row["auroc"] != row["auroc"] or signal not in (MARKS if own else CROSSES):
            continue  # no mistakes to be told, or too much for a picture
        marker, color = MARKS[signal] if own else (CROSSES[signal], GREY)
        label = SAID[signal] if own else f"{SAID[signal]}, {row['model']}"
        place = tasks.index(row["task"])
        shown[label] = axes.scatter(row["auroc"], place, marker=marker, color=color, s=42, zorder=3)
    for place in range(len(tasks)):
        axes.axhline(place, color=GREY, linewidth=0.5, alpha=0.5)
    axes.axvline(0.5, color=GREY, linestyle="--", linewidth=1)
    counts = {row["task"]: row["positives"] for row in trust if row["model"] == name}
    axes.set_yticks(range(len(tasks)), [f"{task} ({counts[task]})" for task in tasks])
    axes.set_ylim(len(tasks) - 0.4, -0.65)
    axes.set_xlim(-0.03, 1.03)
    axes.set(
        xlabel="AUROC (dashed, 0.5: chance; 1: always told apart)",
        title="Telling mistakes and foreign images",
    )
    axes.legend(
        shown.values(), shown.keys(), fontsize=8, frameon=False, ncols=2, loc="upper center",
        bbox_to_anchor=(0.35, -0.16),
    )  # fmt: skip

"""The figure of the extrapolation study: accuracy and energy at other numbers of iterations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from implicit_attn.studies.extrapolation import Extrapolation
from implicit_attn.studies.figures.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    drawing,
    leave_empty,
    legend_below,
    show_best,
    write_in_corner,
)
from implicit_attn.studies.tables import Table

LOG_FROM = 20.0  # ratio of the largest to the smallest loss above which the axis is logarithmic
LABEL_GAP = 0.09  # least distance of two labels beside a curve, as a share of the panel's width


def extrapolation_figure(path: str | Path, title: str, found: Extrapolation, trained: int) -> None:
    """Six panels: accuracy, loss, residual, energy, adaptive stopping, iterations per sample."""
    with drawing(path, title, (16, 9)) as figure:
        axes = figure.subplots(2, 3)
        for panel, key in zip(axes.flat, ("accuracy", "loss", "residual", "energy"), strict=False):
            _draw_curves(panel, found.curves, key, trained)
        axes[0, 0].set(ylabel="test accuracy, %", title="Accuracy")
        axes[0, 1].set(ylabel="test loss (cross-entropy)", title="Loss")
        name = "Residual of a solve, last relative change of a recurrence"
        axes[0, 2].set(ylabel="relative residual (median)", yscale="log", title=name)
        axes[1, 0].set(ylabel="energy (mean)", title="Energy")
        _draw_adaptive(axes[1, 1], found, trained)
        _draw_depths(axes[1, 2], found)
        legend_below(figure, axes[0, 0])


def _draw_curves(axes: Any, curves: Table, key: str, trained: int) -> None:
    methods = list(dict.fromkeys(row["method"] for row in curves))
    markers = "osv^DP*"
    drawn: list[float] = []
    for number, name in enumerate(methods):
        rows = [row for row in curves if row["method"] == name and row.get(key) is not None]
        if not rows:
            continue
        values = [(100.0 if key == "accuracy" else 1.0) * row[key] for row in rows]
        steps = [row["evaluations"] for row in rows]
        look: Any = {"marker": markers[number % len(markers)], "markersize": 4, "linewidth": 1.2}
        axes.plot(steps, values, color=f"C{number}", label=name, **look)
        drawn += values
    axes.set_xlabel("iterations (evaluations) at test time")
    if not drawn:
        leave_empty(axes, f"no {key} is defined")
        return
    most = max(row["evaluations"] for row in curves)
    for multiple in range(1, most // trained + 1):
        label = f"1x, 2x, ... training ({trained})" if multiple == 1 else None
        axes.axvline(multiple * trained, color=GREY, linestyle=":", linewidth=1, label=label)
    if key == "accuracy":
        first = [row for row in curves if row["method"] in methods[:2]]
        _show_best(axes, drawn, first, trained)
    elif key == "loss" and max(drawn) > LOG_FROM * min(drawn):
        axes.set_yscale("log")


def _show_best(axes: Any, drawn: list[float], rows: Table, trained: int) -> None:
    """Cut off what is far below the best, except accuracies of ``rows`` from ``trained`` on."""
    later = [100 * row["accuracy"] for row in rows if row["evaluations"] >= trained]
    if show_best(axes, drawn, later) is not None:
        write_in_corner(axes, f"cut off below\n(lowest {min(drawn):.1f} %)")


def _draw_adaptive(axes: Any, found: Extrapolation, trained: int) -> None:
    first = found.curves[0]["method"]
    fixed = [row for row in found.curves if row["method"] == first]
    drawn: list[float] = []
    for rows, label, color, marker, size in (
        (fixed, f"fixed depth ({first})", GREY, "o", 3),
        (found.adaptive, "every sample stops at the tolerance", ORANGE, "s", 4),
    ):
        steps, accuracy = zip(*((r["evaluations"], 100 * r["accuracy"]) for r in rows), strict=True)
        axes.plot(steps, accuracy, label=label, color=color, marker=marker, markersize=size)
        drawn += accuracy
    last = -float("inf")
    for row in found.adaptive:
        if row["evaluations"] - last >= LABEL_GAP * fixed[-1]["evaluations"]:
            last = row["evaluations"]
            text: Any = {"textcoords": "offset points", "xytext": (4, -11), "fontsize": 8}
            axes.annotate(f"{row['rtol']:g}", (last, 100 * row["accuracy"]), **text)
    axes.axvline(trained, color=GREY, linestyle=":", linewidth=1, label=f"training ({trained})")
    _show_best(axes, drawn, fixed, trained)
    axes.set(
        xlabel="mean iterations per sample",
        ylabel="test accuracy, %",
        title="Adaptive stopping (numbers: tolerance) and fixed depth",
    )
    axes.legend(frameon=False, fontsize=8)


def _draw_depths(axes: Any, found: Extrapolation) -> None:
    """Histograms for three tolerances that most samples meet: the others show only the limit."""
    met = [row["rtol"] for row in found.adaptive if row["stopped"] >= 0.5]
    shown = met[:: max(1, len(met) // 3)][-3:] if met else [found.adaptive[0]["rtol"]]
    total = sum(row["samples"] for row in found.depths if row["rtol"] == shown[0])
    most = max(row["evaluations"] for row in found.depths if row["rtol"] in shown)
    for rtol, color in zip(shown, (BLUE, ORANGE, GREEN), strict=False):
        count = {r["evaluations"]: r["samples"] for r in found.depths if r["rtol"] == rtol}
        share = [100 * count.get(k, 0) / total for k in range(1, most + 1)]
        edges = [k + 0.5 for k in range(most + 1)]
        label = f"tolerance {rtol:g}"
        axes.stairs(share, edges, color=color, fill=True, alpha=0.45, label=label)
    axes.set(
        xlabel="iterations until the sample stops",
        ylabel="share of samples, %",
        title="Iterations per sample under adaptive stopping",
    )
    axes.legend(frameon=False)

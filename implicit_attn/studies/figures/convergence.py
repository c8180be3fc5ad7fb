"""The figure of the convergence study: solvers side by side, and the Jacobian's eigenvalues."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from implicit_attn.studies.figures.canvas import (
    BLUE,
    GREY,
    NOTE_BOX,
    ORANGE,
    draw_band,
    drawing,
    leave_empty,
    legend_below,
)
from implicit_attn.studies.tables import Table

SMALLEST = 1e-12  # smaller energies are drawn here: a logarithmic axis has no zero


def convergence_figure(
    path: str | Path,
    title: str,
    curves: Table,
    costs: tuple[Table, Table],
    eigenvalues: Table,
    rtol: float,
) -> None:
    """Six panels: residual, energy, histograms, evaluations, time, eigenvalues."""
    ends, steps = costs
    colors = {row["solver"]: f"C{number}" for number, row in enumerate(ends)}
    goal = f"to {rtol:g}, or to the limit"
    with drawing(path, title, (16, 9)) as figure:
        axes = figure.subplots(2, 3)
        _draw_residuals(axes[0, 0], curves, colors, rtol)
        _draw_energies(axes[0, 1], curves, colors)
        _draw_histograms(axes[0, 2], steps, colors)
        axes[0, 2].set_xlabel(f"evaluations {goal}")
        _draw_bars(axes[1, 0], ends, colors, "evaluations")
        most = [row["evaluations_largest"] for row in ends]
        axes[1, 0].plot(most, range(len(ends)), "|", color="black", markersize=14)
        label = "evaluations per sample (bar: median, stroke: most)"
        axes[1, 0].set(xlabel=label, title=f"Evaluations {goal}")
        _draw_bars(axes[1, 1], ends, colors, "seconds")
        axes[1, 1].set(xlabel="seconds for all samples", title=f"Time {goal}")
        _draw_eigenvalues(axes[1, 2], eigenvalues)
        legend_below(figure, axes[0, 0])


def _draw_residuals(axes: Any, curves: Table, colors: dict[str, str], rtol: float) -> None:
    for name, color in colors.items():
        rows = [row for row in curves if row["solver"] == name]
        draw_band(axes, rows, "evaluation", "residual", color, name, alpha=0.12)
    axes.axhline(rtol, color=GREY, linestyle="--", label=f"tolerance {rtol:g}")
    axes.set(
        xlabel="evaluations per sample",
        ylabel="best relative residual |f(z) - z| / |f(z)|",
        yscale="log",
        title="Residual (median; band: 10 % to 90 %)",
    )


def _draw_energies(axes: Any, curves: Table, colors: dict[str, str]) -> None:
    axes.set(xlabel="evaluations per sample", title="Energy")
    seen = [row for row in curves if row.get("energy_above") is not None]
    if not seen:
        leave_empty(axes, "this layer has no energy")
        return
    for name, color in colors.items():
        rows = [row for row in seen if row["solver"] == name]
        above = [max(row["energy_above"], SMALLEST) for row in rows]
        axes.plot([row["evaluation"] for row in rows], above, color=color)
    axes.set(ylabel="energy above the lowest found (median)", yscale="log")


def _draw_histograms(axes: Any, steps: Table, colors: dict[str, str]) -> None:
    """One histogram a solver, each on its own line and scaled to its own height."""
    most = max(row["evaluations"] for row in steps)
    width = max(1, most // 50)
    for place, (name, color) in enumerate(colors.items()):
        count: Counter[int] = Counter()
        for row in steps:
            if row["solver"] == name:
                count[row["evaluations"] // width * width] += row["samples"]
        heights = [0.8 * number / max(count.values()) for number in count.values()]
        axes.bar(list(count), heights, width, bottom=-place, align="edge", color=color)
        axes.axhline(-place, color=color, linewidth=0.8)
    axes.set_yticks([-k for k in range(len(colors))], list(colors))
    limits: Any = {"xlim": (0, most + 2 * width), "ylim": (-len(colors) + 0.85, 1.0)}
    axes.set(title="Evaluations per sample: histograms", **limits)


def _draw_bars(axes: Any, ends: Table, colors: dict[str, str], key: str) -> None:
    axes.barh(range(len(ends)), [row[key] for row in ends], color=list(colors.values()))
    side: Any = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
    for place, row in enumerate(ends):
        if row["converged"] < 1:
            text = f"{100 * row['converged']:.0f} % converged"
            axes.text(0.97, place, text, bbox=NOTE_BOX, **side)
    axes.set_yticks(range(len(ends)), list(colors))
    axes.invert_yaxis()


def _draw_eigenvalues(axes: Any, eigenvalues: Table) -> None:
    real = [row["real"] for row in eigenvalues]
    imaginary = [row["imaginary"] for row in eigenvalues]
    radius = max((a * a + b * b) ** 0.5 for a, b in zip(real, imaginary, strict=True))
    samples = len({row["sample"] for row in eigenvalues})
    title = f"Jacobian ({samples} samples): spectral radius {radius:.2f}"
    if any(imaginary):
        axes.scatter(real, imaginary, s=6, color=BLUE, alpha=0.6, label="eigenvalues")
        around = np.linspace(0.0, 2 * np.pi, 200)
        circle = (np.cos(around), np.sin(around))
        axes.plot(*circle, color=GREY, linestyle="--", label="plain iteration converges inside")
        axes.set(xlabel="real part", ylabel="imaginary part", title=title)
        axes.set_aspect("equal", adjustable="datalim")
    else:
        axes.hist(real, bins=60, color=BLUE, label="eigenvalues (all real)")
        for place in (-1.0, 1.0):
            name = "plain iteration converges between these" if place < 0 else None
            axes.axvline(place, color=ORANGE, linestyle="--", label=name)
        axes.set(xlabel="eigenvalue", ylabel="number", yscale="log", title=title)
        axes.set_ylim(top=8 * axes.get_ylim()[1])  # free for the legend
    axes.legend(edgecolor="none", fontsize=9, loc="upper left")

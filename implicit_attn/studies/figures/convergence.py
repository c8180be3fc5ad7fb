"""Pictures of how solvers compare, and of where starts end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from implicit_attn.studies.figures.report import (
    BLUE,
    GREY,
    ORANGE,
    pyplot_without_screen,
    say_nothing,
)
from implicit_attn.studies.paths import SAME
from implicit_attn.studies.tables import Table

SMALLEST = 1e-12  # energies and distances below are drawn here: a logarithm has no zero


def convergence_figure(
    path: str | Path,
    title: str,
    curves: Table,
    costs: tuple[Table, Table],
    eigenvalues: Table,
    rtol: float,
) -> None:
    """Six panels: residual, energy, histogram of steps, evaluations, time, eigenvalues.

    Args:
        path: of the PNG.
        title: of the figure.
        curves: of :func:`implicit_attn.studies.comparison.solver_curves`.
        costs: of :func:`implicit_attn.studies.comparison.solver_costs`.
        eigenvalues: of :func:`implicit_attn.studies.comparison.jacobian_eigenvalues`.
        rtol: tolerance of the costs.
    """
    pyplot = pyplot_without_screen()
    figure, axes = pyplot.subplots(2, 3, figsize=(16, 9), layout="constrained")
    figure.suptitle(title, fontsize=13)
    ends, steps = costs
    names = [row["solver"] for row in ends]
    colors = dict(zip(names, pyplot.get_cmap("tab10").colors, strict=False))
    _draw_residuals(axes[0, 0], curves, colors, rtol)
    _draw_energies(axes[0, 1], curves, colors)
    _draw_steps(axes[0, 2], steps, colors, rtol)
    _draw_bars(axes[1, 0], ends, colors, "evaluations")
    most = [row["evaluations_largest"] for row in ends]
    axes[1, 0].plot(most, range(len(names)), "|", color="black", markersize=14)
    name = "evaluations per sample (bar: median, stroke: most)"
    axes[1, 0].set(xlabel=name, title=f"Evaluations to {rtol:g}, or to the limit")
    _draw_bars(axes[1, 1], ends, colors, "seconds")
    axes[1, 1].set(xlabel="seconds for all samples", title=f"Time to {rtol:g}, or to the limit")
    _draw_eigenvalues(axes[1, 2], eigenvalues)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(Path(path), dpi=110)
    pyplot.close(figure)


def _draw_residuals(axes: Any, curves: Table, colors: dict[str, Any], rtol: float) -> None:
    for name, color in colors.items():
        rows = [row for row in curves if row["solver"] == name]
        steps = [row["evaluation"] for row in rows]
        axes.plot(steps, [row["residual"] for row in rows], color=color, label=name)
        low, high = ([row[f"residual_{k}"] for row in rows] for k in (10, 90))
        axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    axes.axhline(rtol, color=GREY, linestyle="--", label=f"tolerance {rtol:g}")
    axes.set(
        xlabel="evaluations per sample",
        ylabel="best relative residual |f(z) - z| / |f(z)|",
        yscale="log",
        title="Residual (median; band: 10 % to 90 %)",
    )


def _draw_energies(axes: Any, curves: Table, colors: dict[str, Any]) -> None:
    axes.set(xlabel="evaluations per sample", title="Energy")
    drawn = False
    for name, color in colors.items():
        rows = [r for r in curves if r["solver"] == name and r.get("energy_above") is not None]
        if not rows:
            continue
        above = [max(row["energy_above"], SMALLEST) for row in rows]
        axes.plot([row["evaluation"] for row in rows], above, color=color, label=name)
        drawn = True
    if not drawn:
        say_nothing(axes, "this layer has no energy")
        return
    axes.set(ylabel="energy above the lowest found (median)", yscale="log")


def _draw_steps(axes: Any, steps: Table, colors: dict[str, Any], rtol: float) -> None:
    """One histogram a solver, each on its own line and scaled to its own height."""
    most = max(row["evaluations"] for row in steps)
    width = max(1, most // 50)
    for place, (name, color) in enumerate(colors.items()):
        count: dict[int, int] = {}
        for row in steps:
            if row["solver"] == name:
                low = row["evaluations"] // width * width
                count[low] = count.get(low, 0) + row["samples"]
        highest = max(count.values())
        for low, number in count.items():
            height = 0.8 * number / highest
            axes.bar(low, height, width, bottom=-place, align="edge", color=color)
        axes.axhline(-place, color=color, linewidth=0.8)
    axes.set_yticks([-k for k in range(len(colors))], list(colors))
    axes.set(
        xlabel=f"evaluations to {rtol:g}, or to the limit",
        title="Evaluations per sample: histograms",
        xlim=(0, most + 2 * width),
    )


def _draw_bars(axes: Any, ends: Table, colors: dict[str, Any], key: str) -> None:
    names = [row["solver"] for row in ends]
    values = [row[key] for row in ends]
    axes.barh(range(len(names)), values, color=[colors[name] for name in names])
    for place, row in enumerate(ends):
        if row["converged"] < 1:
            text = f"{100 * row['converged']:.0f} % converged"
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}
            side = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
            axes.text(0.97, place, text, bbox=box, **side)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def _draw_eigenvalues(axes: Any, eigenvalues: Table) -> None:
    real = [row["real"] for row in eigenvalues]
    imaginary = [row["imaginary"] for row in eigenvalues]
    radius = max((a * a + b * b) ** 0.5 for a, b in zip(real, imaginary, strict=True))
    samples = len({row["sample"] for row in eigenvalues})
    title = f"Jacobian at the end ({samples} samples): radius {radius:.2f}"
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
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def paths_figure(path: str | Path, title: str, runs: dict[str, tuple[Table, Table]]) -> None:
    """A row of panels for each run: distances of the ends, and agreement of the predictions.

    Args:
        path: of the PNG.
        title: of the figure.
        runs: what was run -> the two tables of ``paths_of_layer`` or ``paths_of_recurrence``.
    """
    pyplot = pyplot_without_screen()
    size = (12, 0.8 + 3.9 * len(runs))
    figure, axes = pyplot.subplots(len(runs), 2, figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(title, fontsize=13)
    for row, (name, (summary, samples)) in zip(axes, runs.items(), strict=True):
        _draw_distances(row[0], name, samples)
        _draw_agreement(row[1], name, summary)
    figure.savefig(Path(path), dpi=110)
    pyplot.close(figure)


def _draw_distances(axes: Any, name: str, samples: Table) -> None:
    reference = samples[0]["start"]
    for start in dict.fromkeys(row["start"] for row in samples):
        if start == reference:
            continue
        far = sorted(max(row["distance"], SMALLEST) for row in samples if row["start"] == start)
        share = [100 * (k + 1) / len(far) for k in range(len(far))]
        axes.step([far[0], *far], [0.0, *share], where="post", label=f"from {start}")
    axes.axvline(SAME, color=GREY, linestyle=":", label="counted as the same point")
    known = [max(row["distance"], SMALLEST) for row in samples if row["start"] != reference]
    axes.set(
        xlabel=f"relative distance to the end from {reference}",
        ylabel="share of samples up to there, %",
        xscale="log",
        xlim=(min(1e-3, 0.5 * min(known)), max(10.0, 2 * max(known))),
        title=f"Where the way ends: {name}",
    )
    axes.legend(frameon=False)


def _draw_agreement(axes: Any, name: str, summary: Table) -> None:
    starts = [row["start"] for row in summary]
    for shift, (key, label, color) in enumerate(
        [
            ("agreement", f"same prediction as from {starts[0]}", BLUE),
            ("accuracy", "accuracy", ORANGE),
        ]
    ):
        places = [k + 0.4 * (shift - 0.5) for k in range(len(starts))]
        shares = [100 * row[key] for row in summary]
        bars = axes.bar(places, shares, width=0.38, color=color, label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(starts)), [f"from {start}" for start in starts])
    axes.set(ylabel="share of samples, %", title=f"Predictions: {name}", ylim=(0, 118))
    axes.legend(frameon=False, loc="upper right", ncols=2)

"""Figures of coupled spins: a classifier's couplings, and mean-field theories against enumeration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from implicit_attn.studies.figures.canvas import BLUE, GREEN, GREY, ORANGE, RED, draw_band, drawing
from implicit_attn.studies.figures.training import (
    draw_extrapolation,
    draw_residual,
    draw_training,
)
from implicit_attn.studies.tables import Table

BEYOND = 1e9  # drawn in place of infinity: outside of every panel
Bands = tuple[tuple[str, str, str], ...]  # column, colour, label of each
MEANS: Bands = (("naive_mean", ORANGE, "naive mean field"), ("tap_mean", BLUE, "adaptive TAP"))
PAIRS: Bands = (
    ("naive_pairs", ORANGE, "naive, $(C^{-1} - J)^{-1}$"),
    ("tap_pairs", BLUE, "TAP, $\\chi = (\\Lambda - J)^{-1}$"),
    ("derivative_pairs", GREEN, "TAP, derivative $\\partial m/\\partial x$"),
)
ORDER_COLOURS = {
    "naive": (ORANGE, "naive mean field"),
    "second": (GREEN, "second order (TAP)"),
    "adaptive": (BLUE, "adaptive TAP"),
}
LOG_PARTITIONS: Bands = tuple((f"{o}_log_partition", *look) for o, look in ORDER_COLOURS.items())
FREE_ENERGIES: Bands = (*LOG_PARTITIONS[:2], ("tap_log_partition", BLUE, "adaptive TAP"))
ORDER_MEANS: Bands = tuple((f"{o}_mean", *look) for o, look in ORDER_COLOURS.items())
EIGENVALUES: Bands = (
    ("tap_eigenvalue", BLUE, "TAP, at its solution"),
    ("naive_eigenvalue", ORANGE, "naive, at its solution"),
    ("truth_eigenvalue", RED, "naive, at the exact means"),
)


def spin_report(
    path: str | Path,
    title: str,
    epochs: Table,
    convergence: Table,
    extrapolation: Table,
    couplings: list[Any],
    *,
    rtol: float,
    trained_evaluations: float,
) -> None:
    """Two rows: training, residual, accuracy against evaluations; couplings during training.

    Args:
        path, title, epochs, convergence, extrapolation, rtol, trained_evaluations: as for
            :func:`implicit_attn.studies.figures.training.training_report`.
        couplings: (N, N) Frobenius norms of the blocks J_ij, before training and after every
            epoch; site 0 is the class token, the others stand on a square grid, row by row.
    """
    with drawing(path, title, (14, 8), dpi=120) as figure:
        upper, lower = figure.subfigures(2, 1, height_ratios=[1.05, 1.0])
        axes = upper.subplots(1, 3)
        draw_training(axes[0], epochs)
        draw_residual(axes[1], convergence, rtol)
        axes[1].set_xlabel("evaluations of the mean-field update")
        draw_extrapolation(axes[2], extrapolation, trained_evaluations)
        draw_couplings(lower, couplings)


def draw_couplings(figure: Any, couplings: list[Any]) -> None:
    """Matrices of norms before, during and after training, and the last one as a graph."""
    last = len(couplings) - 1
    moments = sorted({0, max(1, last // 4), last} & set(range(last + 1)))
    axes = figure.subplots(1, len(moments) + 1)
    top = max(float(np.max(couplings[k])) for k in moments)
    image = None
    for panel, k in zip(axes, moments, strict=False):
        image = panel.imshow(np.asarray(couplings[k]), cmap="viridis", vmin=0.0, vmax=top)
        name = "before training" if k == 0 else f"after epoch {k}"
        panel.set(title=f"Couplings {name}", xlabel="site j (0: class token)", ylabel="site i")
    figure.colorbar(
        image, ax=list(axes[: len(moments)]), label="$|J_{ij}|$ (Frobenius)", shrink=0.8
    )
    draw_coupling_graph(axes[-1], np.asarray(couplings[-1]))


def draw_coupling_graph(axes: Any, norms: Any, share: float = 0.35) -> None:
    """The strongest couplings (N, N) as lines between the sites, site 0 beside the grid."""
    side = round((len(norms) - 1) ** 0.5)
    places = [(-1.4, (side - 1) / 2)] + [(float(k % side), k // side) for k in range(side * side)]
    rows, columns = np.triu_indices(len(norms), 1)
    strength = norms[rows, columns]
    least = np.quantile(strength, 1 - share)
    widest = float(strength.max()) or 1.0
    for i, j, value in zip(rows, columns, strength, strict=True):
        if value < least:
            continue
        (x0, y0), (x1, y1) = places[i], places[j]
        color = ORANGE if i == 0 else BLUE
        relative = float(value) / widest
        axes.plot([x0, x1], [y0, y1], color=color, linewidth=4 * relative**2, alpha=0.75 * relative)
    axes.scatter(*zip(*places, strict=True), s=90, color=[ORANGE] + [BLUE] * side**2, zorder=3)
    axes.annotate(
        "class\ntoken", places[0], (0, -12), textcoords="offset points", ha="center", va="top"
    )
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_title(f"Strongest {100 * share:.0f} % of couplings,\nsites at their positions")


def mean_field_report(path: str | Path, title: str, tables: Mapping[str, Table]) -> None:
    """Mean-field theories against enumeration: errors and consistency, a row for each family.

    Args:
        path, title: of the figure, a PNG.
        tables: name of a family of models -> table of
            :func:`implicit_attn.studies.error_against_coupling`.
    """
    with drawing(path, title, (20.0, 1.3 + 4.0 * len(tables)), dpi=120) as figure:
        axes = figure.subplots(len(tables), 5, squeeze=False, sharex="col")
        for row, (name, table) in zip(axes, tables.items(), strict=True):
            means, pairs, logs, eigenvalues, shares = row
            draw_errors(means, table, MEANS)
            means.set(ylabel=f"{name}\n\nrelative error", title="Means $\\langle S_i\\rangle$")
            draw_errors(pairs, table, PAIRS)
            pairs.axhline(1.0, color=GREY, linestyle="--", label='"nothing is correlated"')
            of_pairs = "$\\langle S_i S_j\\rangle - \\langle S_i\\rangle\\langle S_j\\rangle$"
            pairs.set(ylabel="relative error", title=f"Correlations {of_pairs}")
            draw_errors(logs, table, FREE_ENERGIES)
            logs.set(ylabel="$|\\log Z - $ exact$|$", title="Free energy of the model")
            draw_eigenvalues(eigenvalues, table)
            draw_shares(shares, table)
            for panel in (means, pairs, logs):
                panel.legend(frameon=False, loc="lower right")
            for panel in (eigenvalues, shares):
                panel.legend(frameon=False, loc="upper right")
        for panel in axes[-1]:
            panel.set_xlabel("strength s of the couplings")
        figure.supxlabel(
            "Lines: medians over random models, bands: 10 % to 90 % of them. Every model counts in "
            "every quantile; one without a consistent solution of a theory counts as infinitely "
            "wrong.\nRed: naive mean field's $C^{-1} - J$ taken at the exact means. Where it has a "
            "negative eigenvalue the exact means cannot be a stable state of naive mean field.",
            fontsize=10,
        )


def draw_errors(axes: Any, table: Table, bands: Bands) -> None:
    """Relative errors on a logarithmic axis that shows all finite quantiles, and 1."""
    _draw_bands(axes, table, bands)
    columns = [name + suffix for name, _, _ in bands for suffix in ("_10", "", "_90")]
    finite = [row[column] for row in table for column in columns if 0 < row[column] < np.inf]
    axes.set_yscale("log")
    axes.set_ylim(0.5 * min([0.2, *finite]), 2 * max([1.0, *finite]))


def draw_eigenvalues(axes: Any, table: Table) -> None:
    """The consistency criterion: below zero a theory is inconsistent."""
    _draw_bands(axes, table, EIGENVALUES)
    axes.axhline(0.0, color=GREY, linestyle="--")
    bottom = min(-0.5, *(row["truth_eigenvalue"] for row in table))
    axes.axhspan(2 * bottom, 0.0, color=GREY, alpha=0.12, linewidth=0)
    axes.text(0.03, 0.03, "inconsistent", transform=axes.transAxes, color=GREY)
    axes.set(
        ylim=(1.3 * bottom, 1.3 - 0.4 * bottom),  # room for the legend
        ylabel="smallest eigenvalue (1: no couplings)",
        title="Consistency: $\\Lambda - J$ positive definite",
    )


def draw_shares(axes: Any, table: Table) -> None:
    """Shares of models for which a theory is consistent, and stable."""
    strength = [row["strength"] for row in table]
    for name, color, style, label in (
        ("tap_consistent", BLUE, "-", "TAP, at its solution"),
        ("tap_stable", GREEN, "--", "... and $\\partial m/\\partial x$ positive too"),
        ("naive_consistent", ORANGE, ":", "naive, at its solution"),
        ("truth_consistent", RED, "-", "naive, at the exact means"),
    ):
        share = [100 * row[name] for row in table]
        axes.plot(strength, share, "o", color=color, linestyle=style, markersize=3, label=label)
    axes.set(
        ylim=(-3, 152),  # room for the legend
        yticks=range(0, 101, 20),
        ylabel="% of the models",
        title="Models with a consistent theory",
    )


def _draw_bands(axes: Any, table: Table, bands: Bands) -> None:
    """Median and band where the median is finite; an infinite quantile leaves the panel."""
    for name, color, label in bands:
        finite = [
            {**row, f"{name}_90": min(row[f"{name}_90"], BEYOND)}
            for row in table
            if np.isfinite(row[name])
        ]
        look = {"alpha": 0.15, "marker": "o", "markersize": 3}
        draw_band(axes, finite, "strength", name, color, label, **look)

"""Pictures of coupled sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from implicit_attn.studies.plots import (
    BLUE,
    ORANGE,
    draw_extrapolation,
    draw_residual,
    draw_training,
    pyplot_without_screen,
)
from implicit_attn.studies.tables import Table


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
    """Two rows: training, residual, accuracy against evaluations; couplings while they are learned.

    Args:
        path: of the PNG.
        title: of the figure.
        epochs, convergence, extrapolation, rtol, trained_evaluations: as for
            :func:`implicit_attn.studies.plots.training_report`.
        couplings: (N, N) Frobenius norms of the blocks J_ij, before training and after every
            epoch; site 0 is the class token, the others stand on a square grid, row by row.
    """
    pyplot = pyplot_without_screen()
    figure = pyplot.figure(figsize=(14, 8), layout="constrained")
    figure.suptitle(title, fontsize=13)
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.05, 1.0])
    axes = upper.subplots(1, 3)
    draw_training(axes[0], epochs)
    draw_residual(axes[1], convergence, rtol)
    axes[1].set_xlabel("evaluations of the mean-field update")
    draw_extrapolation(axes[2], extrapolation, trained_evaluations)
    draw_couplings(lower, couplings)
    figure.savefig(Path(path), dpi=120)
    pyplot.close(figure)


def draw_couplings(figure: Any, couplings: list[Any]) -> None:
    """Matrices of norms at three moments of the training, and the last one as a graph."""
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
    """The strongest couplings as lines between the sites' places in the image.

    Args:
        axes: where to draw.
        norms: (N, N); site 0 is drawn beside the grid of the others.
        share: of the pairs that are drawn.
    """
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
    axes.set_title(f"Strongest {100 * share:.0f} % of couplings,\nsites at their places")

"""What the figures share: colours, the titled canvas, bands of quantiles, notes in panels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from implicit_attn.optional import require
from implicit_attn.studies.tables import Table

WINDOW = 10.0  # percentage points of accuracy that are drawn below the best
BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#d9772b", "#3a8f5c", "#b5323c", "#777777"
NOTE_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}


@contextmanager
def drawing(
    path: str | Path, title: str, size: tuple[float, float], *, dpi: int = 110
) -> Iterator[Any]:
    """A titled figure of ``size`` inches, written to ``path`` as PNG when the block ends."""
    require("matplotlib", extra="examples").use("Agg")
    pyplot = require("matplotlib.pyplot", extra="examples")
    figure = pyplot.figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=13)
    try:
        yield figure
        figure.savefig(Path(path), dpi=dpi)
    finally:
        pyplot.close(figure)


def draw_band(
    axes: Any,
    rows: Table,
    step: str,
    key: str,
    color: str,
    label: str | None,
    *,
    band_label: str | None = None,
    alpha: float = 0.2,
    **line: Any,
) -> None:
    """Column ``key`` against column ``step``, with the band from ``key_10`` to ``key_90``."""
    steps = [row[step] for row in rows]
    low, high = ([row[f"{key}_{percent}"] for row in rows] for percent in (10, 90))
    axes.fill_between(steps, low, high, color=color, alpha=alpha, linewidth=0, label=band_label)
    axes.plot(steps, [row[key] for row in rows], color=color, label=label, **line)


def legend_below(figure: Any, axes: Any) -> None:
    """The legend of one panel, in one row below all panels that it explains."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def show_best(axes: Any, values: list[float], needed: list[float] | None = None) -> float | None:
    """Limit a panel of accuracies (%) to the ``WINDOW`` points below the best of ``values``.

    The values ``needed`` stay visible even where they are further below. Returns the lower limit,
    or None where everything fits.
    """
    top = max(values)
    height = max(WINDOW, 1.05 * (top - min(needed or [top])))
    if top - min(values) <= height:
        return None
    axes.set_ylim(top - height, top + 0.05 * height)
    return top - height


def write_in_corner(axes: Any, text: str) -> None:
    """A small note in the lower left corner of a panel."""
    axes.text(0.02, 0.03, text, fontsize=8, bbox=NOTE_BOX, transform=axes.transAxes, va="bottom")


def leave_empty(axes: Any, reason: str) -> None:
    """A panel that has nothing to show says why."""
    axes.text(0.5, 0.5, reason, ha="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[], xlabel="")

"""What the studies share: tables, which are lists of rows with equal keys, and their figure."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicit_attn.optional import require

Table = list[dict[str, Any]]
WINDOW = 10.0  # percentage points of accuracy that are drawn below the best
BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#d9772b", "#3a8f5c", "#b5323c", "#777777"
NOTE_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}


def write_table(path: str | Path, table: Table) -> None:
    """Write a table as CSV; ValueError if it is empty or a row has a key that the first lacks."""
    if not table:
        raise ValueError("table must have at least one row, got none")
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def format_table(table: Table) -> str:
    """The table as aligned text."""
    if not table:
        return "(empty)"
    names = list(table[0])
    lines = [names, *([_cell(row[name]) for name in names] for row in table)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Study(ABC):
    """What a study finds. Its fields that are lists are tables, and ``print`` shows some of them.

    Example:
        >>> from implicit_attn import DEQ, studies
        >>> from implicit_attn.updates import MeanFieldAttention
        >>> layer = DEQ(MeanFieldAttention(4, 2, bound=0.5))
        >>> found = studies.paths(layer, torch.randn(8, 4, 2))
        >>> [row["start"] for row in found.summary]
        ['input', 'zero', 'random 1', 'random 2']
        >>> drawn = found.figure()  # or found.figure("paths.png"), or found.save("runs/paths")
    """

    printed: ClassVar[tuple[str, ...]] = ()  # names of the tables that ``str`` shows
    size: ClassVar[tuple[float, float]] = (16, 9)  # of the figure, in inches

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name, without empty ones."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: each for name, each in found.items() if isinstance(each, list) and each}

    @abstractmethod
    def draw(self, figure: Any) -> None:
        """Draw into an empty figure of matplotlib."""

    def figure(self, path: str | Path | None = None, title: str = "") -> Any:
        """The figure of matplotlib, also written to ``path`` where one is given.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = new_figure(self.size, title)
        self.draw(figure)
        if path is not None:
            figure.savefig(Path(path), dpi=110)
        return figure

    def save(self, base: str | Path, title: str = "") -> None:
        """Write ``base.png`` and ``base-NAME.csv`` for each table; folders are made."""
        base = Path(base)
        base.parent.mkdir(parents=True, exist_ok=True)
        self.figure(base.with_name(f"{base.name}.png"), title)
        for name, table in self.tables.items():
            write_table(base.with_name(f"{base.name}-{name}.csv"), table)

    def __str__(self) -> str:
        shown = [name for name in self.printed if name in self.tables]
        return "\n\n".join(f"{name}\n{format_table(self.tables[name])}" for name in shown)


def median_and_band(name: str, values: Tensor) -> dict[str, float]:
    """Median ``name``, 10 % quantile ``name_10`` and 90 % quantile ``name_90``, without NaN."""
    values = values.double()
    shares = values.new_tensor([0.1, 0.5, 0.9])
    low, middle, high = torch.nanquantile(values, shares).tolist()
    return {name: middle, f"{name}_10": low, f"{name}_90": high}


def median_and_largest(name: str, values: Tensor) -> dict[str, float]:
    """Median ``name``, 90 % quantile ``name_90`` and maximum ``name_largest``."""
    values = values.double()
    return {
        name: values.median().item(),
        f"{name}_90": values.quantile(0.9).item(),
        f"{name}_largest": values.max().item(),
    }


def histogram(evaluations: Tensor, **columns: Any) -> Table:
    """Rows with ``columns``, evaluations and samples: how many samples took so many evaluations."""
    values, counts = evaluations.unique(return_counts=True)
    return [
        {**columns, "evaluations": value, "samples": count}
        for value, count in zip(values.tolist(), counts.tolist(), strict=True)
    ]


# What the figures share.


@contextmanager
def drawing(
    path: str | Path, title: str, size: tuple[float, float], *, dpi: int = 110
) -> Iterator[Any]:
    """A titled figure of ``size`` inches, written to ``path`` as PNG when the block ends."""
    figure = new_figure(size, title)
    yield figure
    figure.savefig(Path(path), dpi=dpi)


def new_figure(size: tuple[float, float], title: str) -> Any:
    """A figure of matplotlib of so many inches that no window shows."""
    kind = require("matplotlib.figure", extra="examples").Figure
    figure = kind(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=13)
    return figure


def draw_band(
    axes: Any,
    rows: Table,
    step: str,
    key: str,
    color: str,
    label: str | None,
    *,
    alpha: float = 0.2,
    **line: Any,
) -> None:
    """Column ``key`` against column ``step``, with the band from ``key_10`` to ``key_90``."""
    steps = [row[step] for row in rows]
    low, high = ([row[f"{key}_{percent}"] for row in rows] for percent in (10, 90))
    axes.fill_between(steps, low, high, color=color, alpha=alpha, linewidth=0)
    axes.plot(steps, [row[key] for row in rows], color=color, label=label, **line)


def legend_below(figure: Any, axes: Any) -> None:
    """The legend of one panel, in one row below all panels that it explains."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def show_best(axes: Any, values: list[float]) -> None:
    """Limit a panel of accuracies (%) to the ``WINDOW`` points below the best of ``values``."""
    axes.set_ylim(max(min(values), max(values) - WINDOW) - 0.5, max(values) + 0.5)


def leave_empty(axes: Any, reason: str) -> None:
    """A panel that has nothing to show says why."""
    axes.text(0.5, 0.5, reason, ha="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[], xlabel="")

"""Plain tables, a list of rows with the same keys each, and what a study gives: tables and a figure."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicit_attn.optional import require

Table = list[dict[str, Any]]


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
        kind = require("matplotlib.figure", extra="examples").Figure
        figure = kind(figsize=self.size, layout="constrained")
        figure.suptitle(title, fontsize=13)
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

"""Plain tables: a list of rows, each a dict with the same keys; and columns that sum up samples."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
class Result:
    """What a study of one model finds: tables by name, and a figure of them."""

    tables: dict[str, Table]
    printed: tuple[str, ...]  # names of the tables that are printed
    draw: Callable[[Path, str], None]  # ``draw(path, title)`` writes the figure
    note: str = ""  # appended to the title of the figure

    def write(self, base: Path, title: str) -> None:
        """Write ``base.png`` and ``base-NAME.csv`` of each table; print the chosen tables."""
        figure = base.with_name(f"{base.name}.png")
        self.draw(figure, title + self.note)
        for name, table in self.tables.items():
            write_table(base.with_name(f"{base.name}-{name}.csv"), table)
        for name in self.printed:
            print(f"\n{name}\n{format_table(self.tables[name])}")
        print(f"\nfigure: {figure} (tables beside it as CSV)", flush=True)


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

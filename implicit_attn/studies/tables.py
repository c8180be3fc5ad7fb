"""Plain tables: a list of rows, each a dict with the same keys."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

Table = list[dict[str, Any]]


def write_table(path: str | Path, table: Table) -> None:
    """Write a table as CSV."""
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
    cells = [[_cell(row[name]) for name in names] for row in table]
    widths = [max(len(n), *(len(row[i]) for row in cells)) for i, n in enumerate(names)]
    lines = ["  ".join(n.rjust(w) for n, w in zip(names, widths, strict=True))]
    lines += ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""Common functions of the gallery's examples: command line, tables as CSV, figures."""

import argparse
import csv
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
import tyro
from cycler import cycler
from matplotlib.figure import Figure

from implicit_attn import studies

Table = list[dict[str, Any]]  # the rows have the same keys
Result = tuple[dict[str, Table], Figure]
SHORT = 40  # rows of a table that is printed
COLOURS = ["#2f6db3", "#d9772b", "#3a8f5c", "#b5323c", "#777777"]  # C0 to C4: blue to grey

mpl.use("Agg")
STYLE: dict[Any, Any] = {
    "axes.prop_cycle": cycler(color=COLOURS),
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "figure.titlesize": 13,
}


def run(main: Callable[..., Result], words: Sequence[str] | None = None) -> dict[str, Table]:
    """Call ``main`` with options of the command line, and write its tables and figure to OUT/NAME/.

    Each parameter of ``main`` becomes an option of its type; the comment after it is its help. OUT is the
    option ``--out``, by default "runs".
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    known, others = parser.parse_known_args(words)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = known.out / main.__name__.replace("_", "-")
    with mpl.rc_context(STYLE):
        note = f"{sys.modules[main.__module__].__doc__}\nResults go to runs/, or to --out FOLDER."
        comments = re.findall(r"^    (\w+): .*,  # (.+)$", inspect.getsource(main), re.MULTILINE)
        # The text before the arguments preserves their indentation.
        lines = ["Options.\n\nArgs:", *(f"{name}: {text}" for name, text in comments)]
        main.__doc__ = "\n    ".join(lines)
        tables, figure = tyro.cli(main, args=others, description=note)
        folder.mkdir(parents=True, exist_ok=True)
        short = {name: rows for name, rows in tables.items() if len(rows) <= SHORT}
        text = {"Comment": json.dumps(short)}  # a picture carries the numbers that are printed
        figure.savefig(folder / f"{folder.name}.png", metadata=text)
    plt.close(figure)
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        if name in short:
            print(f"\n{name}", *rows[0], sep="\t")
            for row in rows:
                values = (f"{v:.4g}" if isinstance(v, float) else v for v in row.values())
                print("", *values, sep="\t")
    print(f"\n{folder}: {folder.name}.png, {', '.join(f'{name}.csv' for name in tables)}")
    return tables


def open_subject(weights: str, samples: int) -> Any:
    """Return a trained model with test samples to study, by a file or by the name of shipped weights."""
    if samples < 1:
        raise SystemExit(f"--samples must be positive, got {samples}")
    try:
        return studies.open_subject(weights, samples=samples)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"--weights {weights}: {error}") from None


def columns(table: Table, *keys: str, **where: Any) -> list[list[Any]]:
    """Return the columns ``keys`` of the rows that match ``where``."""
    rows = [row for row in table if all(row[name] == value for name, value in where.items())]
    return [[row[key] for row in rows] for key in keys]


def rows_of(values: Mapping[str, torch.Tensor], **same: Any) -> Table:
    """Return a row for each entry of the tensors (n,), starting with the constant entries ``same``."""
    lines = zip(*(each.tolist() for each in values.values()), strict=True)
    return [same | dict(zip(values, line, strict=True)) for line in lines]


def draw_band(
    axes: Any, table: Table, x: str, key: str, low: str = "_10", high: str = "_90", alpha: float = 0.2,
    **line: Any,
) -> None:  # fmt: skip
    """Draw column ``key`` against column ``x``, and the band between ``key + low`` and ``key + high``."""
    places, middle, *ends = columns(table, x, key, key + low, key + high)
    axes.fill_between(places, *ends, color=line["color"], alpha=alpha, linewidth=0)
    axes.plot(places, middle, **line)


def quantiles(key: str, values: Any) -> dict[str, float]:
    """Return the median ``key`` and the quantiles ``key_10`` and ``key_90`` of ``values``."""
    shares = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    low, middle, high = torch.as_tensor(values).double().quantile(shares).tolist()
    return {key: middle, f"{key}_10": low, f"{key}_90": high}


def legend_below(figure: Figure, axes: Any, ncols: int, **look: Any) -> None:
    """Draw the legend of one panel below all panels."""
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=ncols, frameon=False, **look)

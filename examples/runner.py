"""What the gallery's examples share: options from a function's signature, tables as CSV, one picture."""

from __future__ import annotations

import contextlib
import csv
import functools
import inspect
import io
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
import tyro
from cycler import cycler
from matplotlib.figure import Figure

Tables = dict[str, list[dict[str, Any]]]  # by name; the rows of a table have the same keys
COLOURS = ["#2f6db3", "#d9772b", "#3a8f5c", "#b5323c", "#777777"]  # C0 to C4: blue to grey

mpl.use("Agg")
STYLE: dict[Any, Any] = {
    "axes.prop_cycle": cycler(color=COLOURS),
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "figure.titlesize": 13,
}


def run(main: Callable[..., tuple[Tables, Figure]], words: Sequence[str] | None = None) -> Tables:
    """Call ``main`` with options of the command line; write its tables and its figure to OUT/NAME/.

    Each parameter of ``main`` is an option of its type; the docstring is the help. Integers must be at
    least 1, or at least 0 where the default is 0; other numbers at least 0. A wrong value ends in one
    line and exit code 2, and so does a ``ValueError`` of ``main`` that begins with an option's name.
    """
    options, out = _read(main, words)
    torch.set_num_threads(1)
    torch.manual_seed(options.get("seed", 0))
    folder = out / main.__name__.replace("_", "-")
    with mpl.rc_context(STYLE):
        try:
            tables, figure = main(**options)
        except ValueError as error:
            if str(error).split(" ")[0] not in options:
                raise
            _refuse(f"--{error}")
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{folder.name}.png")
    plt.close(figure)
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        if len(rows) <= 40:
            print(f"\n{name}", *rows[0], sep="\t")
            for row in rows:
                print(
                    "", *(f"{v:.4g}" if isinstance(v, float) else v for v in row.values()), sep="\t"
                )
    print(f"\n{folder}: {folder.name}.png, {', '.join(f'{name}.csv' for name in tables)}")
    return tables


def _read(main: Callable[..., Any], words: Sequence[str] | None) -> tuple[dict[str, Any], Path]:
    """The values of the parameters of ``main``, and that of ``--out``."""
    parameters = dict(inspect.signature(main, eval_str=True).parameters)
    defaults = {name: each.default for name, each in parameters.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters["out"] = inspect.Parameter("out", keyword, default=Path("runs"), annotation=Path)

    @functools.wraps(main)
    def read(out: Path = Path("runs"), **options: Any) -> tuple[dict[str, Any], Path]:
        return defaults | options, out

    setattr(read, "__signature__", inspect.Signature(list(parameters.values())))  # noqa: B010
    read.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options, out = tyro.cli(read, args=words)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        lines = (
            line.strip("│| ") for line in said.getvalue().splitlines()[1:]
        )  # a box in a terminal
        blocks = itertools.groupby(lines, lambda line: any(map(str.isalnum, line)))
        _refuse(" ".join(next(block for is_text, block in blocks if is_text)))
    for name, value in options.items():
        for each in value if isinstance(value, tuple) else [value]:
            low = int(isinstance(each, int) and defaults[name] != 0)
            if (
                isinstance(each, int | float)
                and not isinstance(each, bool)
                and not low <= each < math.inf
            ):
                _refuse(f"--{name.replace('_', '-')} must be at least {low} and finite, got {each}")
    return options, out


def _refuse(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    raise SystemExit(2)

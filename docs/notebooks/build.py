"""Runs the notebooks of this folder and writes their pages: text, code, what it printed, its pictures.

    python docs/notebooks/build.py                     # every NAME.py -> NAME.md, NAME.ipynb, NAME-1.png, ...
    python docs/notebooks/build.py own_energy          # one of them

A notebook is a Python file in the percent format, which Jupytext, VS Code and PyCharm open as one: cells
begin with ``# %%``, or with ``# %% [markdown]`` for text in comments. Its cells share their variables, the
value of a cell's last line is shown, and so are its figures of matplotlib. The file ``NAME.ipynb`` has
the same cells without their output and opens in Jupyter and Colab.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
DPI = 80


class Cell(NamedTuple):
    text: bool  # or code
    source: str


def read_cells(path: Path) -> list[Cell]:
    """The cells of a notebook."""
    cells: list[Cell] = []
    for part in ("\n" + path.read_text(encoding="utf-8")).split("\n# %%")[1:]:
        head, _, body = part.partition("\n")
        if head.strip() not in ("", "[markdown]"):
            raise ValueError(
                f"{path.name}: a cell must begin with '# %%' or '# %% [markdown]', got {head!r}"
            )
        text = "[markdown]" in head
        if text:
            body = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.splitlines())
        cells.append(Cell(text, body.strip("\n")))
    return cells


def run_cell(source: str, variables: dict[str, Any], name: str) -> str:
    """What a cell printed, and the value of its last line."""
    tree = ast.parse(source, name)
    last: Any = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec", dont_inherit=True), variables)
        if last is not None:
            code = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
            value = eval(code, variables)
            first = value[0] if isinstance(value, (list, tuple)) and value else value
            # What matplotlib returns is not shown: the figure is shown itself.
            if value is not None and not type(first).__module__.startswith("matplotlib"):
                print(value)
    return printed.getvalue().rstrip()


def save_figures(stem: str, number: int, folder: Path) -> list[str]:
    """Markdown of the figures that a cell drew, saved and closed; ``number`` is that of the first."""
    lines = []
    for place, key in enumerate(plt.get_fignums(), start=number):
        figure = plt.figure(key)
        titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
        title = figure.get_suptitle() or "; ".join(titles[:2]) or f"figure {place}"
        file = f"{stem}-{place}.png"
        figure.savefig(folder / file, dpi=DPI, bbox_inches="tight", metadata={"Software": None})
        plt.close(figure)
        lines.append(f"![{title}]({file})")
    return lines


def build(path: Path, folder: Path) -> str:
    """The page of a notebook; its pictures are written to ``folder``."""
    mpl.use("Agg")
    plt.close("all")
    variables: dict[str, Any] = {"__name__": "__main__"}
    blocks, pictures = [], 0
    for cell in read_cells(path):
        if cell.text:
            blocks.append(cell.source)
            continue
        blocks.append(f"```python\n{cell.source}\n```")
        output = run_cell(cell.source, variables, path.name)
        if output:
            blocks.append(f"```text\n{output}\n```")
        figures = save_figures(path.stem, pictures + 1, folder)
        pictures += len(figures)
        blocks += figures
    origin = (
        f"*This page was made by running [{path.name}]({path.name}), which editors open as a notebook. "
        f"[{path.stem}.ipynb]({path.stem}.ipynb) has the same cells for Jupyter and Colab.*"
    )
    return "\n\n".join([*blocks, origin]) + "\n"


def jupyter(path: Path) -> str:
    """The notebook in Jupyter's format 4.4, after a cell that installs the package."""
    install = Cell(False, '%pip install --quiet "implicit-attn[examples]"')
    cells: list[dict[str, Any]] = []
    for cell in [install, *read_cells(path)]:
        source = cell.source.splitlines(keepends=True)
        common = {
            "cell_type": "markdown" if cell.text else "code",
            "metadata": {},
            "source": source,
        }
        cells.append(common if cell.text else common | {"execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def notebooks() -> list[Path]:
    """The notebooks of this folder."""
    return sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    known = {path.stem: path for path in notebooks()}
    parser.add_argument("names", nargs="*", choices=[[], *known], help="all")
    for name in parser.parse_args().names or known:
        page = known[name].with_suffix(".md")
        page.write_text(build(known[name], HERE), encoding="utf-8")
        page.with_suffix(".ipynb").write_text(jupyter(known[name]), encoding="utf-8")
        print(page.name)

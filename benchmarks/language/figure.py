"""The figure: validation losses of the forms, and how far they are from plain attention."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.language.claims import Losses, differences, of_row
from benchmarks.language.rows import PLAIN, ROWS, SIZES
from implicit_attn.studies.figures.canvas import drawing

TITLE = "Attention as steps of descent: losses of language models"


def draw(path: Path, losses: Losses) -> None:
    """A column a size: the losses, and below them the differences from plain attention."""
    sizes = [size for size in SIZES if of_row(losses, size, PLAIN)]
    with drawing(path, TITLE, (max(8.0, 6.6 * len(sizes)), 8.4), dpi=90) as figure:
        panels = figure.subplots(2, len(sizes), squeeze=False)
        for place, size in enumerate(sizes):
            _draw_losses(panels[0][place], losses, size)
            _draw_differences(panels[1][place], losses, size)
        handles: dict[str, Any] = {}
        for axes in panels.flat:
            lines, names = axes.get_legend_handles_labels()
            handles |= dict(zip(names, lines, strict=True))
        ordered = [name for name in ROWS if name in handles]
        figure.legend(
            [handles[name] for name in ordered], ordered,
            loc="outside lower center", ncols=len(sizes) + 2, frameon=False, fontsize=9,
        )  # fmt: skip


def _draw_losses(axes: Any, losses: Losses, size: str) -> None:
    tops = []
    for name, row in ROWS.items():
        curves = list(of_row(losses, size, name).values())
        if not curves:
            continue
        steps = list(curves[0])
        middle = [mean(curve[step] for curve in curves) for step in steps]
        tops.append(middle[min(1, len(middle) - 1)])
        axes.plot(steps, middle, color=row.color, linestyle=row.dashes, label=name, linewidth=1.4)
    numbers = dict(word.split("=") for word in SIZES[size] if "=" in word)
    axes.set_title(
        f"{size}: d {numbers['dim']}, {numbers['layers']} blocks, {numbers['length']} characters",
        fontsize=11,
    )
    axes.set(xlabel="training step", ylabel="validation loss (nats a character)")
    axes.set_ylim(top=max(tops) + 0.05)


def _draw_differences(axes: Any, losses: Losses, size: str) -> None:
    for name, row in ROWS.items():
        if name == PLAIN:
            continue
        apart = list(differences(losses, size, name, PLAIN).values())
        if not apart:
            continue
        steps = list(apart[0])
        for each in apart if len(apart) > 1 else ():
            axes.plot(steps, list(each.values()), color=row.color, linewidth=0.6, alpha=0.6)
        middle = [mean(each[step] for each in apart) for step in steps]
        axes.plot(steps, middle, color=row.color, linestyle=row.dashes, label=name, linewidth=1.6)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=0.05)
    axes.set(xlabel="training step", ylabel="loss above plain attention, same seed (nats)")
    axes.set_title("differences (thin: single seeds; linear within 0.05)", fontsize=11)

"""Figures of Sudoku as a Potts model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from implicit_attn.studies.experiments.boards.puzzles import MIXED
from implicit_attn.studies.experiments.boards.solving import Example
from implicit_attn.studies.figures.canvas import BLUE, GREEN, GREY, ORANGE, RED, drawing
from implicit_attn.studies.tables import Table

COLOURS = (BLUE, RED, GREEN, ORANGE, GREY, "#7d4fa3", "black")  # three models, two ways, and logic
MARKS = ("o", "s", "^", "D", "v", "P", "X")
CENTRE = 40  # the cell in the middle of the board


def graph_figure(
    path: str | Path, title: str, steps: Table, boards: Table, strengths: dict[str, Tensor]
) -> None:
    """Precision against steps and boards, and the couplings of one cell."""
    with drawing(path, title, (12.5, 7.2)) as figure:
        top, bottom = figure.subfigures(2, 1, height_ratios=(1.15, 1))
        left, right = top.subplots(1, 2, width_ratios=(1, 1.5))
        names = list(dict.fromkeys(row["model"] for row in boards))
        style = {
            name: {"color": COLOURS[k], "marker": MARKS[k], "markersize": 5}
            for k, name in enumerate(names)
        }
        _curves(left, steps, "steps", style)
        left.set(xlabel="steps of Adam (128 boards each, random symmetries)")
        _curves(right, boards, "boards", style)
        right.set(xlabel="different boards, no symmetries")
        right.axhline(810 / 3240, color="black", linewidth=0.8, linestyle=":")
        right.text(0.99, 810 / 3240 + 0.015, "chance", ha="right", transform=_across(right), size=8)
        right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
        _strengths(bottom, strengths)


def _curves(axes: Any, table: Table, key: str, style: dict[str, dict[str, Any]]) -> None:
    for name in dict.fromkeys(row["model"] for row in table):
        rows = [row for row in table if row["model"] == name]
        values = [row["precision"] for row in rows]
        axes.plot([row[key] for row in rows], values, label=name, **style[name])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(ylim=(0, 1.05), ylabel="precision of the 810 strongest pairs")
    axes.grid(alpha=0.3)


def _across(axes: Any) -> Any:
    """x in shares of the panel, y in data."""
    return axes.get_yaxis_transform()


def _strengths(figure: Any, strengths: dict[str, Tensor]) -> None:
    """The strength of the pairs of the middle cell, and of all pairs."""
    panels = figure.subplots(1, 2 * len(strengths))
    for (name, scores), (one, every) in zip(
        strengths.items(), zip(panels[0::2], panels[1::2], strict=True), strict=True
    ):
        image = scores[CENTRE].view(9, 9)
        one.imshow(image.numpy(), cmap="Blues", vmin=0)
        one.plot(4, 4, marker="x", color=RED, markersize=8)
        for line in (2.5, 5.5):
            one.axhline(line, color="black", linewidth=0.8)
            one.axvline(line, color="black", linewidth=0.8)
        one.set(xticks=[], yticks=[])
        one.set_title(f"{name}:\nthe pairs of the cell ×", fontsize=9)
        every.imshow(scores.numpy(), cmap="Blues", vmin=0)
        every.set(xticks=[0, 27, 54, 80], yticks=[0, 27, 54, 80])
        every.set_title("strength of all pairs\n(cell against cell)", fontsize=9)


def solving_figure(
    path: str | Path, title: str, table: Table, example: Example, clues: str
) -> None:
    """Shares of boards and cells against the number of clues, and one board."""
    with drawing(path, title, (13, 4.8)) as figure:
        boards, cells, board = figure.subplots(1, 3)
        _by_clues(boards, table, "solved", "boards solved")
        _by_clues(cells, table, "cells", "unknown cells right")
        handles, labels = boards.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        draw_board(board, example)
        found = "solved" if torch.equal(example.filled, example.solution) else "not solved"
        board.set_title(
            f"a puzzle of {clues} clues, {found} by the learned couplings\n"
            "bold: clues; blue: found; red: wrong", fontsize=9,
        )  # fmt: skip


def belief_figure(path: str | Path, title: str, table: Table) -> None:
    """Shares of boards and cells against the number of clues."""
    with drawing(path, title, (10, 5.2)) as figure:
        boards, cells = figure.subplots(1, 2)
        _by_clues(boards, table, "solved", "boards solved")
        _by_clues(cells, table, "cells", "unknown cells right")
        handles, labels = boards.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)


def _by_clues(panel: Any, table: Table, key: str, label: str) -> None:
    """One curve a method, without the mixed puzzles."""
    for index, name in enumerate(dict.fromkeys(row["method"] for row in table)):
        rows = [r for r in table if r["method"] == name and r["clues"] != MIXED]
        numbers = [int(row["clues"]) for row in rows]
        panel.plot(
            numbers, [100 * row[key] for row in rows], label=name,
            color=COLOURS[index], marker=MARKS[index], markersize=5,
        )  # fmt: skip
    panel.set_xticks(sorted({int(row["clues"]) for row in table if row["clues"] != MIXED}))
    panel.set(xlabel="clues of the puzzle", ylabel=f"{label} (%)", ylim=(-3, 103))
    panel.grid(alpha=0.3)


def draw_board(
    axes: Any, example: Example, size: float = 13, strengths: Tensor | None = None
) -> None:
    """The nine by nine cells, clues bold, found digits blue or red.

    Args:
        axes: of the board.
        example: its clues, its digits and those that are right.
        size: of the digits.
        strengths: (81,) in 0 .. 1, the fainter the less; None: all alike.
    """
    for line in range(10):
        width = 1.6 if line % 3 == 0 else 0.4
        axes.plot([line, line], [0, 9], color="black", linewidth=width)
        axes.plot([0, 9], [line, line], color="black", linewidth=width)
    shown = torch.ones(81) if strengths is None else strengths
    cells = zip(*(values.tolist() for values in (*example, shown)), strict=True)
    for index, (clue, digit, right, strength) in enumerate(cells):
        axes.text(
            index % 9 + 0.5, 8.5 - index // 9, str(clue or digit), ha="center", va="center",
            fontsize=size, weight="bold" if clue else "normal",
            color="black" if clue else BLUE if digit == right else RED,
            alpha=1.0 if clue else strength,
        )  # fmt: skip
    axes.set_aspect("equal")
    axes.axis("off")

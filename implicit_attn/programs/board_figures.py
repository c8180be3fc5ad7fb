"""Sudoku boards as pictures: one board, and a learned solver that fills it in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicit_attn.data import board_counts
from implicit_attn.models import BoardSolver
from implicit_attn.optional import require
from implicit_attn.studies.tables import BLUE, GREEN, GREY, ORANGE, RED, drawing

COLOURS = (RED, ORANGE, BLUE, GREEN, GREY, "black")
FAINTEST = 0.15  # of a digit that has hardly any probability more than the others


class Frame(NamedTuple):
    """A board after some iterations: most probable digits and their probabilities, (81,) each."""

    iterations: int
    digits: Tensor
    certainty: Tensor


@torch.no_grad()
def frames_of(model: BoardSolver, puzzle: Tensor, at: Sequence[int]) -> list[Frame]:
    """The board (81,) after each of the numbers of iterations ``at``, rising."""
    frames, wanted = [], set(at)
    for number, logits in enumerate(model.trajectory(puzzle.unsqueeze(0), max(at)), start=1):
        if number in wanted:
            certainty, digits = logits[0].softmax(-1).max(-1)
            frames.append(Frame(number, digits + 1, certainty))
    return frames


def filling_figure(
    path: str | Path,
    curves: dict[str, list[float]],
    marks: Sequence[int],
    trained: int,
    puzzle: Tensor,
    solution: Tensor,
    frames: Sequence[Frame],
) -> None:
    """Solved boards (%) against iterations, a curve a number of givens, and one board (81,) filling in.

    ``curves`` are shares after ``marks`` iterations, of which training had at most ``trained``.
    """
    title = "Sudoku by a learned update, repeated"
    with drawing(path, title, (4.6 + 2.9 * len(frames), 3.9)) as figure:
        curve, *boards = figure.subplots(1, 1 + len(frames), width_ratios=[1.5] + [1] * len(frames))
        for color, (name, shares) in zip(COLOURS, curves.items(), strict=False):
            values = [100 * share for share in shares]
            curve.plot(marks, values, color=color, marker="o", markersize=4, label=f"{name} givens")
        curve.axvline(trained, color="black", linewidth=0.8, linestyle=":")
        curve.text(trained, 2, " most in training", fontsize=8)
        curve.set_xscale("log", base=2)
        curve.set_xticks(list(marks), [str(mark) for mark in marks])
        curve.set(xlabel="iterations", ylabel="boards solved (%)", ylim=(-3, 103))
        curve.grid(alpha=0.3)
        curve.legend(fontsize=8, loc="lower right")
        for axes, frame in zip(boards, frames, strict=True):
            draw_frame(axes, puzzle, solution, frame)


def filling_animation(
    path: str | Path, puzzle: Tensor, solution: Tensor, frames: Sequence[Frame]
) -> None:
    """The board, one picture a frame, as a GIF; the last one stays for two seconds."""
    require("matplotlib", extra="examples").use("Agg")
    pyplot = require("matplotlib.pyplot", extra="examples")
    image = require("PIL.Image", extra="examples")
    figure = pyplot.figure(figsize=(3.6, 4.0), dpi=80, layout="constrained")
    pictures = []
    try:
        axes = figure.subplots()
        for frame in frames:
            axes.clear()
            draw_frame(axes, puzzle, solution, frame)
            canvas: Any = figure.canvas
            canvas.draw()
            size, pixels = canvas.get_width_height(), canvas.buffer_rgba()
            pictures.append(image.frombytes("RGBA", size, bytes(pixels)).convert("RGB"))
    finally:
        pyplot.close(figure)
    times = [170] * (len(pictures) - 1) + [2000]  # in milliseconds
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=times, loop=0)


def draw_frame(axes: Any, puzzle: Tensor, solution: Tensor, frame: Frame) -> None:
    """The nine by nine cells, found digits the fainter the less certain."""
    more = (frame.certainty - 1 / 9) / (1 - 1 / 9)  # than none
    draw_board(axes, puzzle, frame.digits, solution, 11, more.clamp(FAINTEST, 1.0))
    right, unknown = board_counts(frame.digits[None], puzzle[None], solution[None])
    word = "iteration" if frame.iterations == 1 else "iterations"
    axes.set_title(
        f"after {frame.iterations} {word}\n{int(right)} of {int(unknown)} unknown right",
        fontsize=10,
    )


def draw_board(
    axes: Any,
    puzzle: Tensor,
    filled: Tensor,
    solution: Tensor,
    size: float = 13,
    strengths: Tensor | None = None,
) -> None:
    """The nine by nine cells of a puzzle (81,), 0 = unknown, clues bold, found digits blue or red.

    ``strengths`` (81,) in 0 .. 1 make digits the fainter the less they are; None: all alike.
    """
    for line in range(10):
        width = 1.6 if line % 3 == 0 else 0.4
        axes.plot([line, line], [0, 9], color="black", linewidth=width)
        axes.plot([0, 9], [line, line], color="black", linewidth=width)
    shown = torch.ones(81) if strengths is None else strengths
    cells = zip(*(values.tolist() for values in (puzzle, filled, solution, shown)), strict=True)
    for index, (clue, digit, right, strength) in enumerate(cells):
        axes.text(
            index % 9 + 0.5, 8.5 - index // 9, str(clue or digit), ha="center", va="center",
            fontsize=size, weight="bold" if clue else "normal",
            color="black" if clue else BLUE if digit == right else RED,
            alpha=1.0 if clue else strength,
        )  # fmt: skip
    axes.set_aspect("equal")
    axes.axis("off")

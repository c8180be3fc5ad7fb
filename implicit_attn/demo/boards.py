"""Sudoku boards as an update fills them in, and how they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicit_attn.data import board_counts
from implicit_attn.models import BoardSolver
from implicit_attn.studies.study import BLUE, RED

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


def draw_frame(axes: Any, puzzle: Tensor, solution: Tensor, frame: Frame) -> None:
    """The nine by nine cells, found digits the fainter the less certain."""
    more = (frame.certainty - 1 / 9) / (1 - 1 / 9)  # than none
    draw_board(axes, puzzle, frame.digits, solution, 11, more.clamp(FAINTEST, 1.0))
    right, unknown = board_counts(frame.digits[None], puzzle[None], solution[None])
    word = "iteration" if frame.iterations == 1 else "iterations"
    title = f"after {frame.iterations} {word}\n{int(right)} of {int(unknown)} unknown right"
    axes.set_title(title, fontsize=10)


def draw_board(
    axes: Any, puzzle: Tensor, filled: Tensor, solution: Tensor, size: float = 13,
    strengths: Tensor | None = None,
) -> None:  # fmt: skip
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

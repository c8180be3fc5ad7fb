"""Sudoku boards as tensors: their rules, symmetries, and the measures of a prediction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SIDE, CELLS = 9, 81


def units() -> Tensor:
    """(27, 9): the cells of the rows, the columns and the boxes."""
    cells = torch.arange(CELLS).view(SIDE, SIDE)
    boxes = cells.view(3, 3, 3, 3).transpose(1, 2).reshape(SIDE, SIDE)
    return torch.cat([cells, cells.T, boxes])


def solved(boards: Tensor) -> Tensor:
    """(B,) bool: whether every row, column and box of boards (B, 81) has each digit once."""
    digits = boards[:, units().to(boards.device)].sort(-1).values
    return (digits == torch.arange(1, SIDE + 1, device=boards.device)).all(-1).all(-1)


def check_boards(name: str, puzzles: Tensor, solutions: Tensor) -> None:
    """Raise where puzzles and solutions do not fit; errors as in :class:`SudokuData`."""
    for what, boards in (("puzzles", puzzles), ("solutions", solutions)):
        if boards.dtype != torch.int64:
            raise TypeError(f"{name}: {what} are {boards.dtype}, expected torch.int64")
        if boards.dim() != 2 or boards.shape[1] != CELLS or len(boards) == 0:
            raise ValueError(f"{name}: {what} are {tuple(boards.shape)}, expected (N, 81), N >= 1")
    if puzzles.shape != solutions.shape:
        raise ValueError(f"{name}: {len(puzzles)} puzzles and {len(solutions)} solutions")
    wrong = {
        "a solution that breaks the rules": ~solved(solutions),
        "a clue that is not in its solution": ((puzzles != 0) & (puzzles != solutions)).any(1),
        "no unknown cell": (puzzles != 0).all(1),
    }
    for what, where in wrong.items():
        if where.any():
            raise ValueError(f"{name}: puzzle {int(where.nonzero()[0])} has {what}")


def board_counts(predicted: Tensor, puzzles: Tensor, solutions: Tensor) -> tuple[Tensor, Tensor]:
    """Correctly predicted unknown cells, and unknown cells, of every board, (B,) int64 each.

    The cell accuracy is the quotient of their sums; a board is solved where they are equal.

    Args:
        predicted: (B, 81) digits 1 .. 9; those of known cells are not looked at.
        puzzles: (B, 81), 0 = unknown.
        solutions: (B, 81).
    """
    if not predicted.shape == puzzles.shape == solutions.shape:
        raise ValueError(
            f"predicted {tuple(predicted.shape)}, puzzles {tuple(puzzles.shape)} and solutions "
            f"{tuple(solutions.shape)} must have one shape (B, 81)"
        )
    unknown = puzzles == 0
    return ((predicted == solutions) & unknown).sum(1), unknown.sum(1)


@dataclass(frozen=True)
class SudokuSymmetries:
    """Random symmetries of boards, one each: they keep puzzles valid and solutions unique.

    Rows within a band, bands, columns within a stack, stacks and digits are permuted, and the board
    is transposed with probability one half: 2 * 6^8 * 9! maps, drawn uniformly.

    Call: ``symmetries(puzzles (B, 81), solutions (B, 81), generator) -> (puzzles, solutions)``.
    """

    def __call__(
        self, puzzles: Tensor, solutions: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        number = len(puzzles)
        rows, columns = _lines(number, generator), _lines(number, generator)
        cells = (SIDE * rows[:, :, None] + columns[:, None, :]).view(number, CELLS)
        turned = torch.rand(number, 1, generator=generator) < 0.5
        cells = torch.where(turned, cells.view(-1, SIDE, SIDE).mT.reshape(number, CELLS), cells)
        digits = torch.rand(number, SIDE, generator=generator).argsort(1) + 1
        digits = torch.cat([torch.zeros(number, 1, dtype=torch.int64), digits], dim=1)
        cells, digits = cells.to(puzzles.device), digits.to(puzzles.device)
        moved = [digits.gather(1, boards.gather(1, cells)) for boards in (puzzles, solutions)]
        return moved[0], moved[1]


def _lines(number: int, generator: torch.Generator) -> Tensor:
    """(number, 9) permutations of the lines of a board that keep the bands together."""
    bands = torch.rand(number, 3, generator=generator).argsort(1)
    within = torch.rand(number, 3, 3, generator=generator).argsort(2)
    return (3 * bands[:, :, None] + within).view(number, SIDE)

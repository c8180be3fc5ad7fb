"""Boards that are solved by a mean field: what comes out, and the boards that are still on the way."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from implicit_attn.data.sudoku_boards import CELLS, SIDE, solved

DECIDED = 0.5  # a cell with a digit at least as probable counts as decided


class BoardStatus(IntEnum):
    """How the solve of a board ended.

    * ``SOLVED``: each row, column and box has every digit once.
    * ``BROKEN``: every cell is decided, and a rule is broken.
    * ``UNDECIDED``: a rule is broken, and some cell has no digit with a probability of one half.
    * ``NONFINITE``: a probability is not finite.
    """

    SOLVED = 0
    BROKEN = 1
    UNDECIDED = 2
    NONFINITE = 3


@dataclass(frozen=True)
class SudokuAnswer:
    """Filled boards.

    Attributes:
        boards: (B, 81) int64, the most probable digits, 1 .. 9; the clues of the puzzle as they are.
        probabilities: (B, 81, 9), the means of the mean field.
        status: (B,) int64 of :class:`BoardStatus`. It is decided by the rules, not by a solution.
        residual: (B,) largest ``|softmax(beta J m) - m|`` of a cell that is neither a clue nor fixed,
            at these means and the beta that was reached.
        steps: (B,) int64, evaluations of the mean field until the board was finished.
    """

    boards: Tensor
    probabilities: Tensor
    status: Tensor
    residual: Tensor
    steps: Tensor

    @property
    def solved(self) -> Tensor:
        """(B,) bool."""
        return self.status == BoardStatus.SOLVED


class MeanFieldBoards(Protocol):
    """What gives the field of the means."""

    def field(self, means: Tensor) -> Tensor:
        """(B, 81, 9) -> (B, 81, 9)."""
        ...


class BoardRun:
    """The boards that are still being solved, and the places of all for their results."""

    def __init__(self, puzzles: Tensor, start: Tensor) -> None:
        self.puzzles = check_puzzles(puzzles)
        digits = torch.arange(1, SIDE + 1, device=puzzles.device)
        clues = puzzles.unsqueeze(2) == digits
        self.known = clues.any(2, keepdim=True)  # (B, 81, 1): clues, and fixed cells
        self.means = torch.where(self.known, clues.to(start), start)
        self.active = torch.arange(len(puzzles), device=puzzles.device)
        self.step = 0
        self.kept = torch.empty_like(self.means)
        self.residual = start.new_empty(len(puzzles))
        self.steps = torch.zeros_like(self.active)

    def advance(self, model: MeanFieldBoards, beta: float, damping: float) -> None:
        """One damped step of the mean field in the cells that are not known."""
        response = torch.softmax(beta * model.field(self.means), -1)
        self.means = torch.where(self.known, self.means, self.means.lerp(response, damping))
        self.step += 1

    def solved(self) -> Tensor:
        """(active,) bool. Clues are one-hot, so that the largest mean is theirs."""
        return solved(self.means.argmax(2) + 1)

    def ended(self) -> Tensor:
        """(active,) bool: solved, or with a mean that is not finite, from which there is no way back."""
        return self.solved() | ~self.means.flatten(1).isfinite().all(1)

    def take_out(self, done: Tensor, model: MeanFieldBoards, beta: float) -> None:
        """Write the results of the boards that are done, and go on with the others."""
        which = self.active[done]
        if len(which) == 0:
            return
        means, known = self.means[done], self.known[done]
        response = torch.softmax(beta * model.field(means), -1)
        self.residual[which] = (response - means).masked_fill(known, 0.0).abs().amax((1, 2))
        self.kept[which], self.steps[which] = means, self.step
        left = ~done
        self.active, self.means, self.known = self.active[left], self.means[left], self.known[left]

    def fix_surest(self) -> None:
        """In each board, make the most certain of the cells that are not known one-hot."""
        rows = torch.arange(len(self.active), device=self.active.device)
        cells = self.means.amax(2).masked_fill(self.known.squeeze(2), -1.0).argmax(1)
        digits = self.means[rows, cells].argmax(1)
        self.means[rows, cells] = torch.nn.functional.one_hot(digits, SIDE).to(self.means)
        self.known = self.known.index_put(
            (rows, cells), torch.ones_like(rows, dtype=torch.bool)[:, None]
        )

    def answer(self) -> SudokuAnswer:
        means = self.kept
        boards = torch.where(self.puzzles == 0, means.argmax(2) + 1, self.puzzles)
        undecided = (means.amax(2) < DECIDED).any(1)
        status = torch.where(undecided, int(BoardStatus.UNDECIDED), int(BoardStatus.BROKEN))
        status = torch.where(solved(boards), int(BoardStatus.SOLVED), status)
        finite = means.flatten(1).isfinite().all(1)
        status = torch.where(finite, status, int(BoardStatus.NONFINITE))
        return SudokuAnswer(boards, means, status, self.residual, self.steps)


def check_puzzles(puzzles: Tensor) -> Tensor:
    """Puzzles (B, 81) of integers in 0 .. 9, or errors that say so."""
    if not isinstance(puzzles, Tensor) or puzzles.dtype != torch.int64:
        kind = puzzles.dtype if isinstance(puzzles, Tensor) else type(puzzles).__name__
        raise TypeError(f"puzzles must be int64 (B, 81), got {kind}")
    if puzzles.dim() != 2 or puzzles.shape[1] != CELLS or len(puzzles) == 0:
        raise ValueError(f"puzzles must be (B, 81) with B >= 1, got {tuple(puzzles.shape)}")
    low, high = (int(value) for value in puzzles.aminmax())
    if low < 0 or high > SIDE:
        raise ValueError(f"puzzles must hold 0 .. 9, got {low} .. {high}")
    return puzzles

"""Sudoku boards: rules, symmetries, measures of a prediction, a solver, puzzles with one solution."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.core.checks import require_count

SIDE, CELLS = 9, 81
ALL = (1 << SIDE) - 1  # a bit a digit
PLACES = [  # row, column and box of every cell
    (cell // SIDE, cell % SIDE, 3 * (cell // (3 * SIDE)) + cell % SIDE // 3)
    for cell in range(CELLS)
]


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


def sudoku_pairs() -> Tensor:
    """(81, 81) bool: the 810 pairs of different cells in one row, column or box, both directions."""
    pairs = torch.zeros(CELLS, CELLS, dtype=torch.bool)
    for unit in units():
        pairs[unit[:, None], unit] = True
    return pairs.fill_diagonal_(False)


def solve_by_singles(puzzles: Tensor) -> Tensor:
    """Fill in naked and hidden singles until there are none, (B, 81); 0 where nothing follows.

    A naked single is a cell that only one digit is left for, a hidden single a digit that only one
    cell of a row, column or box is left for.

    Args:
        puzzles: (B, 81) int64, 0 = unknown.
    """
    pairs, cells = sudoku_pairs().float(), units()
    digits = torch.arange(1, SIDE + 1)
    clues = puzzles.unsqueeze(2) == digits
    possible = clues | (puzzles == 0).unsqueeze(2)  # (B, 81, 9)
    while True:
        single = possible.sum(2, keepdim=True) == 1
        seen = torch.einsum("ij,bjd->bid", pairs, (possible & single).float()) > 0
        left = possible & ~seen
        in_units = left[:, cells]  # (B, 27, 9 cells, 9 digits)
        hidden = in_units & (in_units.sum(2, keepdim=True) == 1)
        forced = torch.zeros_like(left, dtype=torch.int64)
        forced.index_add_(1, cells.flatten(), hidden.flatten(1, 2).long())
        is_forced = forced > 0
        left = torch.where(is_forced.any(2, keepdim=True), left & is_forced, left)
        if torch.equal(left, possible):
            break
        possible = left
    return torch.where(possible.sum(2) == 1, possible.long().argmax(2) + 1, 0)


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


def solve_sudoku(
    puzzle: Sequence[int], most: int = 2, chooser: random.Random | None = None
) -> list[list[int]]:
    """Up to ``most`` solutions of a puzzle, by depth-first search in the most constrained cell.

    Args:
        puzzle: 81 digits, 0 = unknown.
        most: stop when so many are found; 2 tells whether a solution is the only one.
        chooser: draws the order in which digits are tried; None: increasing.

    Raises:
        ValueError: not 81 digits in 0 .. 9.
    """
    if len(puzzle) != CELLS or not all(0 <= digit <= SIDE for digit in puzzle):
        raise ValueError(f"puzzle must be 81 digits in 0 .. 9, got {list(puzzle)!r}")
    rows, columns, boxes = [ALL] * SIDE, [ALL] * SIDE, [ALL] * SIDE  # digits still free in each
    board = list(puzzle)
    found: list[list[int]] = []

    def toggle(cell: int, bit: int) -> None:
        row, column, box = PLACES[cell]
        rows[row] ^= bit
        columns[column] ^= bit
        boxes[box] ^= bit

    for cell, digit in enumerate(board):
        if digit:
            row, column, box = PLACES[cell]
            if not (rows[row] & columns[column] & boxes[box]) >> (digit - 1) & 1:
                return []  # two clues contradict each other
            toggle(cell, 1 << (digit - 1))

    def search(open_cells: list[int]) -> None:
        if not open_cells:
            found.append(board.copy())
            return
        fewest, chosen, allowed = SIDE + 1, -1, 0
        for cell in open_cells:
            row, column, box = PLACES[cell]
            free = rows[row] & columns[column] & boxes[box]
            count = free.bit_count()
            if count < fewest:
                fewest, chosen, allowed = count, cell, free
                if count <= 1:
                    break
        rest = [cell for cell in open_cells if cell != chosen]
        digits = [digit for digit in range(SIDE) if allowed >> digit & 1]
        if chooser is not None:
            chooser.shuffle(digits)
        for digit in digits:
            board[chosen] = digit + 1
            toggle(chosen, 1 << digit)
            search(rest)
            toggle(chosen, 1 << digit)
            if len(found) >= most:
                return

    search([cell for cell, digit in enumerate(board) if digit == 0])
    return found


def unique_puzzles(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Minimal puzzles: one solution each, and without any one of the clues more than one.

    The cells of a random full board are emptied in random order, but for those without which there
    would be a second solution. About 24 clues are left.

    Returns:
        Puzzles and solutions, (number, 81) int64 each.
    """
    require_count("number", number)
    chooser = random.Random(seed)
    puzzles, solutions = [], []
    for _ in range(number):
        solution = solve_sudoku([0] * CELLS, most=1, chooser=chooser)[0]
        puzzle = solution.copy()
        for cell in chooser.sample(range(CELLS), CELLS):
            puzzle[cell] = 0
            if len(solve_sudoku(puzzle)) > 1:
                puzzle[cell] = solution[cell]
        puzzles.append(puzzle)
        solutions.append(solution)
    return torch.tensor(puzzles), torch.tensor(solutions)

"""A solver that counts solutions, and puzzles that have exactly one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from implicit_attn.data.sudoku_boards import CELLS, SIDE
from solvers.core.checks import require_count

ALL = (1 << SIDE) - 1  # a bit a digit


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
        row, column, box = _PLACES[cell]
        rows[row] ^= bit
        columns[column] ^= bit
        boxes[box] ^= bit

    for cell, digit in enumerate(board):
        if digit:
            row, column, box = _PLACES[cell]
            if not (rows[row] & columns[column] & boxes[box]) >> (digit - 1) & 1:
                return []  # two clues contradict each other
            toggle(cell, 1 << (digit - 1))

    def search(open_cells: list[int]) -> None:
        if not open_cells:
            found.append(board.copy())
            return
        fewest, chosen, allowed = SIDE + 1, -1, 0
        for cell in open_cells:
            row, column, box = _PLACES[cell]
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

    Raises:
        TypeError: ``number`` is no integer.
        ValueError: ``number`` < 1.
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


_PLACES = [
    (cell // SIDE, cell % SIDE, 3 * (cell // (3 * SIDE)) + cell % SIDE // 3)
    for cell in range(CELLS)
]

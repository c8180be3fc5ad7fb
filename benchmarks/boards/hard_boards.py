"""Sudoku boards that are hard for a search, made offline: ``python benchmarks/boards/hard_boards.py``.

python benchmarks/boards/hard_boards.py [--boards 200] [--rounds 2000] [--seed 0] [--out hard.npz]

Most boards of 17 givens fall to singles; a board is hard where a search has to guess. The search here
fills in naked and hidden singles and guesses in a cell with the fewest digits left. Its guesses depend on
the order in which it tries cells and digits: a board's score is the mean of log(1 + guesses) over ten
random orders, and its "guesses" are exp(score) - 1, rounded.

A pool of minimal boards with one solution each is bred: a board is drawn, three of its givens are
dropped, the rest is completed in another way, givens are added until the solution is the only one,
those that are not needed are taken away, and the easiest board of the pool makes room if it is easier.
The result is the same for equal seeds. The file has ``puzzle``, ``solution`` (uint8, (N, 81)) and
``guesses``, so that ``implicit_attn.data.sudoku.read_list`` reads it.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import tyro

from implicit_attn.data.sudoku import CELLS, SIDE, sudoku_pairs, unique_puzzles, units

BINS = {"0": 0, "1-2": 1, "3-10": 3, "11-50": 11, "51+": 51}  # least number of guesses of each
ORDERS, DROPPED = 10, 3
ALL = (1 << CELLS) - 1  # a bit a cell; a board is nine such numbers: where each digit may be
UNITS = [sum(1 << cell for cell in unit) for unit in units().tolist()]
OTHERS = [  # all cells but those that share a row, column or box with this one
    ALL & ~sum(1 << other for other, near in enumerate(row) if near)
    for row in sudoku_pairs().tolist()
]
Planes = list[int]


def place(planes: Planes, cell: int, digit: int) -> None:
    """Put a digit, 0 .. 8, into a cell."""
    bit = 1 << cell
    for other in range(SIDE):
        planes[other] &= OTHERS[cell] if other == digit else ~bit


def fill(planes: Planes) -> tuple[int, int] | None:
    """Fill in singles; the cells with one digit and with two left, None where there is a contradiction."""
    known = 0
    while True:
        one = two = three = 0
        for plane in planes:
            three |= two & plane
            two |= one & plane
            one |= plane
        if one != ALL:
            return None
        fresh = one & ~two & ~known
        known |= fresh
        for digit in range(SIDE):
            found = planes[digit] & fresh
            while found:
                bit = found & -found
                found ^= bit
                place(planes, bit.bit_length() - 1, digit)
        if fresh:
            continue
        for digit in range(SIDE):  # no naked single was left: hidden ones
            if not planes[digit] & two:
                if planes[digit].bit_count() < SIDE:
                    return None
                continue
            for unit in UNITS:
                left = planes[digit] & unit
                if not left:
                    return None
                if not left & (left - 1) and left & two & ~fresh:
                    place(planes, left.bit_length() - 1, digit)
                    fresh |= left
        if not fresh:
            return known, two & ~three


def search(puzzle: list[int], most: int, chooser: random.Random) -> tuple[list[list[int]], int]:
    """Up to ``most`` solutions, and the guesses that were made until then, in a random order."""
    planes = [ALL] * SIDE
    for cell, digit in enumerate(puzzle):
        if digit:
            if not planes[digit - 1] >> cell & 1:
                return [], 0
            place(planes, cell, digit - 1)
    found: list[list[int]] = []
    guesses = 0

    def visit(planes: Planes) -> None:
        nonlocal guesses
        left = fill(planes)
        if left is None:
            return
        known, pairs = left
        if known == ALL:
            found.append(
                [next(d + 1 for d in range(SIDE) if planes[d] >> c & 1) for c in range(CELLS)]
            )
            return
        cells = [cell for cell in range(CELLS) if (pairs or ALL & ~known) >> cell & 1]
        if not pairs:
            counts = {cell: sum(plane >> cell & 1 for plane in planes) for cell in cells}
            cells = [cell for cell in cells if counts[cell] == min(counts.values())]
        cell = chooser.choice(cells)
        digits = [digit for digit in range(SIDE) if planes[digit] >> cell & 1]
        chooser.shuffle(digits)
        for number, digit in enumerate(digits):
            guesses += number < len(digits) - 1  # the last digit left is no guess
            branch = planes.copy()
            place(branch, cell, digit)
            visit(branch)
            if len(found) >= most:
                return

    visit(planes)
    return found, guesses


def score(puzzle: list[int], chooser: random.Random) -> float:
    """Mean of log(1 + guesses) over ten random orders of the search."""
    return sum(math.log1p(search(puzzle, 1, chooser)[1]) for _ in range(ORDERS)) / ORDERS


def bred(puzzle: list[int], chooser: random.Random) -> tuple[list[int], list[int]]:
    """A minimal board with one solution from another one, and its solution."""
    board = puzzle.copy()
    for cell in chooser.sample([cell for cell in range(CELLS) if puzzle[cell]], DROPPED):
        board[cell] = 0
    solution = search(board, 1, chooser)[0][0]
    while other := [each for each in search(board, 2, chooser)[0] if each != solution]:
        cell = chooser.choice([cell for cell in range(CELLS) if solution[cell] != other[0][cell]])
        board[cell] = solution[cell]
    for cell in chooser.sample(
        [cell for cell in range(CELLS) if board[cell]], sum(map(bool, board))
    ):
        board[cell] = 0
        if len(search(board, 2, chooser)[0]) > 1:
            board[cell] = solution[cell]
    return board, solution


def hard_boards(
    number: int, rounds: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Puzzles and solutions (number, 81) int64, easiest first, and their guesses (number,)."""
    chooser = random.Random(seed)
    puzzles, solutions = (boards.tolist() for boards in unique_puzzles(number, seed))
    pool = [
        (score(each, chooser), each, done) for each, done in zip(puzzles, solutions, strict=True)
    ]
    pool.sort()
    for _ in range(rounds):
        board, solution = bred(chooser.choice(pool)[1], chooser)
        pool[0] = max(pool[0], (score(board, chooser), board, solution))
        pool.sort()
    scores, boards, answers = (list(each) for each in zip(*pool, strict=True))
    return torch.tensor(boards), torch.tensor(answers), torch.tensor(scores).expm1().round().long()


def bins(guesses: torch.Tensor) -> dict[str, torch.Tensor]:
    """(N,) bool of every bin of guesses."""
    ends = [*BINS.values(), 1 << 62][1:]
    return {
        name: (guesses >= low) & (guesses < high)
        for (name, low), high in zip(BINS.items(), ends, strict=True)
    }


def main(
    boards: int = 200, rounds: int = 2000, seed: int = 0, out: Path = Path("hard.npz")
) -> None:
    """Sudoku boards that are hard for a search.

    Args:
        boards: of the pool.
        rounds: of breeding.
        seed: of all that is drawn.
        out: file to write.
    """
    puzzles, solutions, guesses = hard_boards(boards, rounds, seed)
    parts = (puzzles.byte().numpy(), solutions.byte().numpy(), guesses.numpy())
    np.savez_compressed(out, puzzle=parts[0], solution=parts[1], guesses=parts[2])
    print(f"{len(puzzles)} boards, {int((puzzles > 0).sum()) / len(puzzles):.1f} givens")
    print("  ".join(f"{name}: {int(each.sum())}" for name, each in bins(guesses).items()))


if __name__ == "__main__":
    tyro.cli(main)

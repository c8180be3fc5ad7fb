"""Boards for the experiments: solved ones to learn from, puzzles with a given number of clues."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_attn.data import load_sudoku, resolve_source, reveal, solve_sudoku
from implicit_attn.data.sudoku import GENERATED_MORE
from implicit_attn.data.sudoku_boards import CELLS, SudokuSymmetries, unique_puzzles
from implicit_attn.training.boards.completion import reveal_up_to
from solvers.core.checks import require_count

MIXED = "mixed"  # the package's own distribution of clues
MOST_BASES = 200  # puzzles that are generated each for itself, 25 ms each
MORE = {"list": 17, "generated": GENERATED_MORE}  # clues revealed at most in it


class Puzzles(NamedTuple):
    """Puzzles (B, 81), 0 = unknown, and their solutions (B, 81)."""

    puzzles: Tensor
    solutions: Tensor


class Boards(NamedTuple):
    """Solved boards for learning, (N, 81) in 1 .. 9, and puzzles for testing by their number of clues.

    ``name`` tells where they come from. No solution is in both parts as it is; the same board up to a
    symmetry may be, and a fit under random symmetries then has seen it in another guise.
    """

    name: str
    train: Tensor
    test: dict[str, Puzzles]


def solved_boards(number: int, source: str, seed: int) -> tuple[str, Tensor]:
    """Different solved boards (number, 81): solutions of the list, or random ones.

    Raises:
        FileNotFoundError, ValueError: as :func:`implicit_attn.data.load_sudoku`.
    """
    if resolve_source(source) == "list":
        data = load_sudoku(number, 1, source="list", seed=seed)
        return data.name, data.train_solutions
    # Not Random(seed), from which puzzles are generated: those to learn from must not be among them.
    chooser = random.Random(f"solved boards, {seed}")
    boards = [solve_sudoku([0] * CELLS, most=1, chooser=chooser)[0] for _ in range(number)]
    return "generated boards", torch.tensor(boards)


def boards_and_puzzles(
    train: int, test: int, clues: list[int], source: str, seed: int, *, mixed: bool = True
) -> Boards:
    """Boards to learn from, and ``test`` puzzles for each number of clues.

    Puzzles get further cells of their solutions until they have so many clues. Minimal puzzles that
    have more to begin with are left out: generated ones have about 24, so that there are fewer than
    ``test`` at 25 and none of 17, and the result has no set of that number. Generated puzzles are
    different boards up to 200, and random symmetries of those beyond. ``mixed`` adds puzzles like
    those of :func:`implicit_attn.data.load_sudoku`, of the list with 17 to 34 clues.

    Raises:
        ValueError: no puzzle has so few clues, at any of the numbers.
    """
    require_count("train", train)
    found = resolve_source(source)
    if found == "list":
        data = load_sudoku(train, test, source=found, more=0, seed=seed)
        name, learned = data.name, data.train_solutions
        minimal = Puzzles(data.test_puzzles, data.test_solutions)
    else:
        minimal = generated_puzzles(test, seed)
        name, learned = "generated Sudoku", solved_boards(train, found, seed)[1]
    generator = torch.Generator().manual_seed(seed)
    sets = {}
    for number in clues:
        few = (minimal.puzzles != 0).sum(1) <= number
        if not bool(few.any()):
            continue
        puzzles, solutions = minimal.puzzles[few], minimal.solutions[few]
        sets[str(number)] = Puzzles(reveal_up_to(puzzles, solutions, number, generator), solutions)
    if not sets:
        least = int((minimal.puzzles != 0).sum(1).min())
        raise ValueError(f"clues must be >= {least} for {name}, got {clues}")
    if mixed:
        puzzles, solutions = minimal.puzzles, minimal.solutions
        sets[MIXED] = Puzzles(reveal(puzzles, solutions, MORE[found], generator), solutions)
    return Boards(name, learned, sets)


def generated_puzzles(number: int, seed: int) -> Puzzles:
    """Minimal puzzles of different boards, from the 201st on random symmetries of the first 200."""
    bases = min(require_count("test", number), MOST_BASES)
    puzzles, solutions = unique_puzzles(bases, seed)
    if number > bases:
        index = torch.arange(bases, number) % bases
        generator = torch.Generator().manual_seed(seed)
        more = SudokuSymmetries()(puzzles[index], solutions[index], generator)
        puzzles, solutions = torch.cat([puzzles, more[0]]), torch.cat([solutions, more[1]])
    return Puzzles(puzzles, solutions)

"""Boards for the experiments: solved ones to learn from, puzzles with a given number of clues."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_attn.data import load_sudoku, resolve_source, reveal, solve_sudoku
from implicit_attn.data.sudoku import GENERATED_MORE
from implicit_attn.data.sudoku_boards import CELLS
from solvers.core.checks import require_count

MIXED = "mixed"  # the package's own distribution of clues
MORE = {"list": 17, "generated": GENERATED_MORE}  # clues revealed at most in it


class Puzzles(NamedTuple):
    """Puzzles (B, 81), 0 = unknown, and their solutions (B, 81)."""

    puzzles: Tensor
    solutions: Tensor


class Boards(NamedTuple):
    """Solved boards for learning, (N, 81) in 1 .. 9, and puzzles for testing by their number of clues.

    ``name`` tells where they come from. No solution is in both parts.
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
    chooser = random.Random(seed)
    boards = [solve_sudoku([0] * CELLS, most=1, chooser=chooser)[0] for _ in range(number)]
    return "generated boards", torch.tensor(boards)


def boards_and_puzzles(
    train: int, test: int, clues: list[int], source: str, seed: int, *, mixed: bool = True
) -> Boards:
    """Boards to learn from, and ``test`` puzzles for each number of clues.

    Puzzles get further cells of their solutions until they have so many clues. Minimal puzzles that
    have more to begin with are left out: generated ones have about 24, so that there are none of 17,
    and the result has no set of that number. ``mixed`` adds puzzles like
    those of :func:`implicit_attn.data.load_sudoku`, of the list with 17 to 34 clues.

    Raises:
        ValueError: no puzzle has so few clues, at any of the numbers.
    """
    require_count("train", train)
    found = resolve_source(source)
    # Generated ones are symmetries of a few boards: those to learn from are made apart, below.
    listed = train if found == "list" else 1
    minimal = load_sudoku(listed, test, source=found, more=0, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    sets = {}
    for number in clues:
        few = (minimal.test_puzzles != 0).sum(1) <= number
        if not bool(few.any()):
            continue
        puzzles, solutions = minimal.test_puzzles[few], minimal.test_solutions[few]
        sets[str(number)] = Puzzles(reveal_to(puzzles, solutions, number, generator), solutions)
    if not sets:
        least = int((minimal.test_puzzles != 0).sum(1).min())
        raise ValueError(f"clues must be >= {least} for {minimal.name}, got {clues}")
    if mixed:
        puzzles, solutions = minimal.test_puzzles, minimal.test_solutions
        sets[MIXED] = Puzzles(reveal(puzzles, solutions, MORE[found], generator), solutions)
    if found == "list":
        return Boards(minimal.name, minimal.train_solutions, sets)
    return Boards(minimal.name, solved_boards(train, found, seed)[1], sets)


def reveal_to(puzzles: Tensor, solutions: Tensor, clues: int, generator: torch.Generator) -> Tensor:
    """Puzzles (B, 81) with random further cells of their solutions, to so many clues in all."""
    known = puzzles != 0
    order = torch.rand(puzzles.shape, generator=generator).masked_fill(known, -1.0)
    place = order.argsort(1).argsort(1)  # the clues come first
    return torch.where(place < clues, solutions, puzzles)

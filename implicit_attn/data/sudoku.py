"""Sudoku: boards with their rules, symmetries and solvers; puzzles from a list, or generated.

The list ``sudoku17.npz`` holds the known puzzles with 17 clues, collected by Gordon Royle
(University of Western Australia) and others after him, under CC BY 2.5: who passes it on, or
results made from it, attributes it to Gordon Royle.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from implicit_attn.data.files import damaged, find, missing
from solvers.core.checks import require_choice, require_count

SIDE, CELLS = 9, 81
ALL = (1 << SIDE) - 1  # a bit a digit
# Row, column and box of every cell, as rows of ``units``.
PLACES = [(k // 9, 9 + k % 9, 18 + 3 * (k // 27) + k % 9 // 3) for k in range(CELLS)]


def units() -> Tensor:
    """(27, 9): the cells of the rows, the columns and the boxes."""
    cells = torch.arange(CELLS).view(SIDE, SIDE)
    boxes = cells.view(3, 3, 3, 3).transpose(1, 2).reshape(SIDE, SIDE)
    return torch.cat([cells, cells.T, boxes])


def solved(boards: Tensor) -> Tensor:
    """(B,) bool: whether every row, column and box of boards (B, 81) has each digit once."""
    digits = boards[:, units().to(boards.device)].sort(-1).values
    return (digits == torch.arange(1, SIDE + 1, device=boards.device)).all(-1).all(-1)


def check_boards(puzzles: Tensor, solutions: Tensor) -> None:
    """Raise a ValueError for boards (N, 81) that break the rules, or puzzles and solutions that differ."""
    for boards in (puzzles, solutions):
        if boards.shape != (max(1, len(puzzles)), CELLS):
            raise ValueError(f"boards must be (N, 81), N >= 1, got {tuple(boards.shape)}")
    wrong = {
        "a solution that breaks the rules": ~solved(solutions),
        "a clue that is not in its solution": ((puzzles != 0) & (puzzles != solutions)).any(1),
        "no unknown cell": (puzzles != 0).all(1),
    }
    for what, where in wrong.items():
        if where.any():
            raise ValueError(f"puzzle {int(where.nonzero()[0])} has {what}")


def board_counts(predicted: Tensor, puzzles: Tensor, solutions: Tensor) -> tuple[Tensor, Tensor]:
    """Correctly predicted unknown cells, and unknown cells, of every board, (B,) int64 each.

    A board is solved where they are equal. All arguments are (B, 81); 0 stands for an unknown cell.
    """
    unknown = puzzles == 0
    return ((predicted == solutions) & unknown).sum(1), unknown.sum(1)


def sudoku_pairs() -> Tensor:
    """(81, 81) bool: the 810 pairs of different cells in one row, column or box, both directions."""
    pairs = torch.zeros(CELLS, CELLS, dtype=torch.bool)
    for unit in units():
        pairs[unit[:, None], unit] = True
    return pairs.fill_diagonal_(False)


def solve_by_singles(puzzles: Tensor) -> Tensor:
    """Fill in naked and hidden singles until none are left, (B, 81); 0 where nothing follows.

    A naked single is the only digit left for a cell, a hidden single the only cell of a unit for a digit.
    """
    pairs, cells = sudoku_pairs().float(), units()
    possible = puzzles.unsqueeze(2) == torch.arange(1, SIDE + 1)
    possible |= (puzzles == 0).unsqueeze(2)  # (B, 81, 9)
    while True:
        single = possible & (possible.sum(2, keepdim=True) == 1)
        left = possible & ~(torch.einsum("ij,bjd->bid", pairs, single.float()) > 0)
        in_units = left[:, cells]  # (B, 27, 9 cells, 9 digits)
        hidden = in_units & (in_units.sum(2, keepdim=True) == 1)
        counts = torch.zeros_like(left, dtype=torch.int64)
        forced = counts.index_add_(1, cells.flatten(), hidden.flatten(1, 2).long()) > 0
        left = torch.where(forced.any(2, keepdim=True), left & forced, left)
        if torch.equal(left, possible):
            return torch.where(possible.sum(2) == 1, possible.long().argmax(2) + 1, 0)
        possible = left


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
        number, device = len(puzzles), generator.device
        rows, columns = _lines(number, generator), _lines(number, generator)
        cells = (SIDE * rows[:, :, None] + columns[:, None, :]).view(number, CELLS)
        turned = torch.rand(number, 1, generator=generator, device=device) < 0.5
        cells = torch.where(turned, cells.view(-1, SIDE, SIDE).mT.reshape(number, CELLS), cells)
        digits = torch.rand(number, SIDE, generator=generator, device=device).argsort(1) + 1
        digits = nn.functional.pad(digits, (1, 0))
        cells, digits = cells.to(puzzles.device), digits.to(puzzles.device)
        moved = [digits.gather(1, boards.gather(1, cells)) for boards in (puzzles, solutions)]
        return moved[0], moved[1]


def _lines(number: int, generator: torch.Generator) -> Tensor:
    """(number, 9) permutations of the lines of a board that keep the bands together."""
    device = generator.device
    bands = torch.rand(number, 3, generator=generator, device=device).argsort(1)
    within = torch.rand(number, 3, 3, generator=generator, device=device).argsort(2)
    return (3 * bands[:, :, None] + within).view(number, SIDE)


def solve_sudoku(
    puzzle: Sequence[int], most: int = 2, chooser: random.Random | None = None
) -> list[list[int]]:
    """Return up to ``most`` solutions of a puzzle, by depth-first search in the most constrained cell.

    Args:
        puzzle: 81 digits, 0 = unknown.
        most: number of solutions at which the search stops; 2 shows whether a solution is unique.
        chooser: draws the order in which digits are tried; None: increasing.

    Raises:
        ValueError: if the puzzle is not 81 digits in 0 .. 9.
    """
    if len(puzzle) != CELLS or not all(0 <= digit <= SIDE for digit in puzzle):
        raise ValueError(f"puzzle must be 81 digits in 0 .. 9, got {list(puzzle)!r}")
    board, found = list(puzzle), list[list[int]]()
    free = [ALL] * (3 * SIDE)  # digits of a row, column or box, a bit each

    def toggle(cell: int, digit: int) -> None:
        for unit in PLACES[cell]:
            free[unit] ^= 1 << digit

    for cell, digit in enumerate(board):
        if digit:
            if not all(free[unit] >> (digit - 1) & 1 for unit in PLACES[cell]):
                return []  # two clues contradict each other
            toggle(cell, digit - 1)

    def search(unknown: list[int]) -> None:
        if not unknown:
            found.append(board.copy())
            return
        fewest, chosen, possible = SIDE + 1, -1, 0
        for cell in unknown:
            row, column, box = PLACES[cell]
            digits = free[row] & free[column] & free[box]
            if (count := digits.bit_count()) < fewest:
                fewest, chosen, possible = count, cell, digits
                if count <= 1:
                    break
        order = [digit for digit in range(SIDE) if possible >> digit & 1]
        if chooser is not None:
            chooser.shuffle(order)
        rest = [cell for cell in unknown if cell != chosen]
        for digit in order:
            if len(found) < most:
                board[chosen] = digit + 1
                toggle(chosen, digit)
                search(rest)
                toggle(chosen, digit)

    search([cell for cell, digit in enumerate(board) if digit == 0])
    return found


def unique_puzzles(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return minimal puzzles and their only solutions, (number, 81) int64 each.

    The cells of a random full board are emptied in random order, except those without which there would
    be a second solution. About 24 clues are left.
    """
    chooser, pairs = random.Random(seed), list[tuple[list[int], list[int]]]()
    for _ in range(require_count("number", number)):
        solution = solve_sudoku([0] * CELLS, most=1, chooser=chooser)[0]
        puzzle = solution.copy()
        for cell in chooser.sample(range(CELLS), CELLS):
            puzzle[cell] = 0
            if len(solve_sudoku(puzzle)) > 1:
                puzzle[cell] = solution[cell]
        pairs.append((puzzle, solution))
    puzzles, solutions = torch.tensor(pairs).unbind(1)
    return puzzles, solutions


# Puzzles with their solutions.

LIST = Path("sudoku") / "sudoku17.npz"
SOURCES = ("auto", "list", "generated")
BASES, GENERATED_MORE = 64, 11  # generated puzzles have about 24 clues to begin with


@dataclass(frozen=True)
class SudokuData:
    """Puzzles with their solutions, split into training and test.

    Attributes:
        name: where they come from, for a report.
        train_puzzles: (N, 81) int64, rows of the board one after another, 0 = unknown.
        train_solutions: (N, 81) int64 in 1 .. 9.
        test_puzzles, test_solutions: (M, 81) each.
    """

    name: str
    train_puzzles: Tensor
    train_solutions: Tensor
    test_puzzles: Tensor
    test_solutions: Tensor


def load_sudoku(
    train: int = 9000,
    test: int = 1000,
    *,
    source: str = "auto",
    more: int | None = None,
    seed: int = 0,
) -> SudokuData:
    """Sudoku puzzles of 17 to 34 clues, made from the list of 17-clue puzzles, or generated ones.

    No solution is in both parts. In each puzzle k more cells are revealed, k uniform in 0 .. ``more``.
    Generated puzzles are random symmetries of a few minimal ones.

    Args:
        train, test: numbers of puzzles.
        source: "list" reads ``sudoku/sudoku17.npz`` from ``$IMPLICIT_ATTN_DATA`` or the cache,
            "generated" makes puzzles, "auto" uses the list if it is there.
        more: largest k; None: 17 for the list (17 to 34 clues), 11 for generated puzzles (about 22 to 37).
        seed: of the draw, the split, the revealed cells and the generated puzzles.

    Raises:
        FileNotFoundError: ``source`` is "list", and there is none.
        ValueError: a number is out of range, or the list holds too few puzzles.
    """
    require_count("train", train)
    require_count("test", test)
    generator = torch.Generator().manual_seed(seed)
    if resolve_source(source) == "generated":
        name, most = "generated Sudoku", GENERATED_MORE
        bases = [min(BASES, train), min(BASES // 4, test)]
        boards = torch.stack(unique_puzzles(sum(bases), seed))
        # Every base is used equally often; training and test share none.
        parts = [torch.arange(train) % bases[0], bases[0] + torch.arange(test) % bases[1]]
        puzzles, solutions = boards[:, torch.cat(parts)]
        puzzles, solutions = SudokuSymmetries()(puzzles, solutions, generator)
    else:
        name, most = "Sudoku, 17-clue list", 17
        boards = torch.stack(read_list(find(*LIST.parts) or LIST))
        boards = boards[:, torch.randperm(boards.shape[1], generator=generator)]
        # A few solutions belong to several puzzles, of which the first one drawn is kept.
        first = np.sort(np.unique(boards[1].numpy(), axis=0, return_index=True)[1])
        if train + test > len(first):
            raise ValueError(
                f"train + test is {train + test}, but {LIST} holds {len(first)} solutions"
            )
        puzzles, solutions = boards[:, torch.from_numpy(first)[: train + test]]
    puzzles = reveal(puzzles, solutions, most if more is None else more, generator)
    return SudokuData(name, puzzles[:train], solutions[:train], puzzles[train:], solutions[train:])


def resolve_source(source: str = "auto") -> str:
    """Return which puzzles :func:`load_sudoku` uses for ``source``: "list" or "generated"."""
    there = find(*LIST.parts) is not None
    if require_choice("source", source, SOURCES) == "list" and not there:
        raise missing(str(LIST))
    return "list" if there and source != "generated" else "generated"


def read_list(path: str | Path, prefix: str = "") -> tuple[Tensor, Tensor]:
    """Puzzles and solutions, (N, 81) int64, the arrays ``PREFIXpuzzle`` and ``PREFIXsolution`` of an .npz.

    Raises:
        ValueError: the file is damaged, does not hold these two, or they do not belong together.
    """
    with open(path, "rb") as file, damaged(path, f"{prefix}puzzle and {prefix}solution"):
        held = np.load(file)
        arrays = [held[f"{prefix}{name}"] for name in ("puzzle", "solution")]
        if kinds := [each.dtype for each in arrays if each.dtype.kind not in "iu"]:
            raise ValueError(f"they must be integers, got {kinds[0]}")
        puzzles, solutions = (torch.from_numpy(each.astype(np.int64)) for each in arrays)
        check_boards(puzzles, solutions)
        return puzzles, solutions


def reveal(puzzles: Tensor, solutions: Tensor, more: int, generator: torch.Generator) -> Tensor:
    """Puzzles (N, 81) with k more random cells of their solutions each, k uniform in 0 .. more."""
    fewest = int((puzzles == 0).sum(1).min())
    if require_count("more", more, low=0) >= fewest:
        raise ValueError(f"more must be < {fewest}, the unknown cells of a puzzle, got {more}")
    chosen = torch.randint(more + 1, (len(puzzles), 1), generator=generator)
    givens = (puzzles != 0).sum(1, keepdim=True)
    return reveal_up_to(puzzles, solutions, givens + chosen, generator)


def reveal_up_to(
    puzzles: Tensor, solutions: Tensor, givens: int | Tensor, generator: torch.Generator
) -> Tensor:
    """Puzzles with random further cells of their solutions, up to a number of givens.

    Args:
        puzzles, solutions: (B, N), 0 = unknown.
        givens: of all puzzles, or (B, 1), one for each; a puzzle with more keeps them.
        generator: draws on its own device.
    """
    order = torch.rand(puzzles.shape, generator=generator, device=generator.device)
    order = order.to(puzzles.device)
    place = order.masked_fill(puzzles != 0, -1.0).argsort(1).argsort(1)  # the givens come first
    most = givens.to(puzzles.device) if isinstance(givens, Tensor) else givens
    return torch.where(place < most, solutions, puzzles)

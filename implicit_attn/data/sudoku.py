"""Sudoku puzzles with their solutions: from the list of 17-clue puzzles, or generated.

The list ``sudoku17.npz`` holds the known puzzles with 17 clues, collected by Gordon Royle
(University of Western Australia) and others after him, under CC BY 2.5: who passes it on, or
results made from it, attributes it to Gordon Royle.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from implicit_attn.data.files import DATA_VARIABLE, damaged, find, search_folders
from implicit_attn.data.sudoku_boards import CELLS, SudokuSymmetries, check_boards, unique_puzzles
from solvers.core.checks import require_choice, require_count

LIST = Path("sudoku") / "sudoku17.npz"
SOURCES = ("auto", "list", "generated")
MOST_PUZZLES = 250_000  # of a list; there are about 50,000 with 17 clues
BASES, GENERATED_MORE = 64, 11  # generated puzzles have about 24 clues to begin with


@dataclass(frozen=True)
class SudokuData:
    """Puzzles with their solutions, split into training and test.

    Attributes:
        name: where they come from, for a report.
        train_puzzles: (N, 81) int64, rows of the board one after another, 0 = unknown.
        train_solutions: (N, 81) int64 in 1 .. 9.
        test_puzzles, test_solutions: (M, 81) each.

    Raises:
        TypeError, ValueError: a dtype, shape or value is wrong, a solution breaks the rules, a
            puzzle has a digit that its solution has not, or no unknown cell.
    """

    name: str
    train_puzzles: Tensor
    train_solutions: Tensor
    test_puzzles: Tensor
    test_solutions: Tensor

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            check_boards(part, getattr(self, f"{part}_puzzles"), getattr(self, f"{part}_solutions"))

    def to(self, device: torch.device | str) -> SudokuData:
        """The same data on another device."""
        names = ("train_puzzles", "train_solutions", "test_puzzles", "test_solutions")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def load_sudoku(
    train: int = 9000,
    test: int = 1000,
    *,
    source: str = "auto",
    more: int | None = None,
    seed: int = 0,
) -> SudokuData:
    """Sudoku puzzles of 17 to 34 clues, made from the list of 17-clue puzzles, or generated ones.

    Puzzles with different solutions are drawn from the list and split, so that no solution is in
    both parts. Then k more cells of its solution are revealed in each, k uniform in 0 .. ``more``.
    Generated puzzles are random symmetries of a few minimal ones (one solution, no clue redundant),
    different ones for training and test.

    Args:
        train, test: numbers of puzzles.
        source: "list" reads ``sudoku/sudoku17.npz`` from ``$IMPLICIT_ATTN_DATA`` or the cache,
            "generated" makes puzzles, "auto" takes the list where it is found.
        more: largest k; None: 17 for the list (17 to 34 clues), 11 for generated
            puzzles (about 22 to 37 clues).
        seed: of the draw, the split, the revealed cells and the generated puzzles.

    Raises:
        FileNotFoundError: ``source`` is "list", and there is none.
        ValueError: a number is out of range, or the list holds too few puzzles.
    """
    found = resolve_source(source)
    require_count("train", train)
    require_count("test", test)
    path = None if found == "generated" else find_list()
    generator = torch.Generator().manual_seed(seed)
    if path is None:
        name, most = "generated Sudoku", GENERATED_MORE
        puzzles, solutions = _generated(train, test, generator, seed)
    else:
        name, most = "Sudoku, 17-clue list", 17
        puzzles, solutions = _drawn(path, train + test, generator)
    puzzles = reveal(puzzles, solutions, most if more is None else more, generator)
    return SudokuData(name, puzzles[:train], solutions[:train], puzzles[train:], solutions[train:])


def resolve_source(source: str = "auto") -> str:
    """Which puzzles :func:`load_sudoku` takes for ``source``: "list" or "generated".

    Raises:
        FileNotFoundError: ``source`` is "list", and there is none.
        ValueError: an unknown source.
    """
    if require_choice("source", source, SOURCES) == "generated":
        return source
    if find_list() is not None:
        return "list"
    if source == "auto":
        return "generated"
    places = ", ".join(str(folder / LIST) for folder in search_folders())
    raise FileNotFoundError(f"no list of puzzles at {places}; set {DATA_VARIABLE}")


def find_list() -> Path | None:
    """The list of 17-clue puzzles in the folders of :func:`search_folders`, or None."""
    return find(*LIST.parts)


def read_list(path: str | Path) -> tuple[Tensor, Tensor]:
    """Puzzles and solutions, (N, 81) int64 each, of an ``.npz`` with ``puzzle`` and ``solution``.

    Raises:
        ValueError: the file is damaged, does not hold these two as integers (N, 81) with N up to
            ``MOST_PUZZLES``, or they do not belong together.
    """
    with (
        open(path, "rb") as file,
        damaged(path, "an .npz file with puzzle and solution"),
        zipfile.ZipFile(file) as archive,
    ):
        puzzles, solutions = (_read_boards(archive, n, path) for n in ("puzzle", "solution"))
    check_boards(str(path), puzzles, solutions)
    return puzzles, solutions


def _read_boards(archive: zipfile.ZipFile, name: str, path: str | Path) -> Tensor:
    """(N, 81) int64; dtype and shape that the header declares are checked before the rest is read."""
    with archive.open(f"{name}.npy") as stream:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"{path}: {name} has .npy version {version}, expected (1, 0)")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(stream)
        if dtype.kind not in "iu":
            raise ValueError(f"{path}: {name} is {dtype}, expected integers")
        if len(shape) != 2 or shape[1] != CELLS or not 1 <= shape[0] <= MOST_PUZZLES:
            raise ValueError(
                f"{path}: {name} is {shape}, expected (N, {CELLS}), 1 <= N <= {MOST_PUZZLES}"
            )
        size = shape[0] * CELLS * dtype.itemsize
        content = stream.read(size + 1)
    if len(content) != size:
        raise ValueError(f"{path}: {name} has {len(content)} bytes, expected {size}")
    values = np.frombuffer(content, dtype).reshape(shape, order="F" if by_columns else "C")
    return torch.from_numpy(values.astype(np.int64, order="C"))


def reveal(puzzles: Tensor, solutions: Tensor, more: int, generator: torch.Generator) -> Tensor:
    """Puzzles (N, 81) with k more random cells of their solutions each, k uniform in 0 .. more.

    Raises:
        ValueError: ``more`` is negative, or so large that a puzzle could become complete.
    """
    fewest = int((puzzles == 0).sum(1).min())
    if require_count("more", more, low=0) >= fewest:
        raise ValueError(f"more must be < {fewest}, the unknown cells of a puzzle, got {more}")
    chosen = torch.randint(more + 1, (len(puzzles), 1), generator=generator)
    # Each cell's place in a random order in which the known cells come last.
    order = torch.rand(puzzles.shape, generator=generator).masked_fill(puzzles != 0, 2.0)
    place = order.argsort(1).argsort(1)
    return torch.where(place < chosen, solutions, puzzles)


def reveal_up_to(
    puzzles: Tensor, solutions: Tensor, givens: int | Tensor, generator: torch.Generator
) -> Tensor:
    """Puzzles with random further cells of their solutions, up to a number of givens.

    Args:
        puzzles, solutions: (B, N), 0 = unknown.
        givens: of all puzzles, or (B, 1), one for each; a puzzle with more keeps them.
        generator: on the CPU.
    """
    order = torch.rand(puzzles.shape, generator=generator).to(puzzles.device)
    place = order.masked_fill(puzzles != 0, -1.0).argsort(1).argsort(1)  # the givens come first
    most = givens.to(puzzles.device) if isinstance(givens, Tensor) else givens
    return torch.where(place < most, solutions, puzzles)


def _drawn(path: Path, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    puzzles, solutions = read_list(path)
    order = torch.randperm(len(puzzles), generator=generator)
    puzzles, solutions = puzzles[order], solutions[order]
    # A few solutions belong to several puzzles: the first one drawn stands for them.
    kinds, which = solutions.unique(dim=0, return_inverse=True)
    if number > len(kinds):
        raise ValueError(f"train + test is {number}, but {path} holds {len(kinds)} solutions")
    places = torch.arange(len(which))
    first = torch.full((len(kinds),), len(which)).scatter_reduce(0, which, places, "amin")
    chosen = first.sort().values[:number]
    return puzzles[chosen], solutions[chosen]


def _generated(
    train: int, test: int, generator: torch.Generator, seed: int
) -> tuple[Tensor, Tensor]:
    bases = [min(BASES, train), min(BASES // 4, test)]
    puzzles, solutions = unique_puzzles(sum(bases), seed)
    # Every base is used as often as every other; the two parts share none.
    index = torch.cat([torch.arange(train) % bases[0], bases[0] + torch.arange(test) % bases[1]])
    return SudokuSymmetries()(puzzles[index], solutions[index], generator)

"""The parts of the Sudoku experiments: boards, logic, counts."""

from __future__ import annotations

import argparse

import pytest
import torch

from implicit_attn.data import solve_sudoku
from implicit_attn.data.sudoku_boards import solved
from implicit_attn.models import sudoku_pairs
from implicit_attn.studies.experiments.boards.commands import source
from implicit_attn.studies.experiments.boards.graph import equal_share
from implicit_attn.studies.experiments.boards.puzzles import (
    MIXED,
    Puzzles,
    boards_and_puzzles,
    solved_boards,
)
from implicit_attn.studies.experiments.boards.singles import solve_by_singles
from implicit_attn.studies.experiments.boards.solving import compare, one_solved
from implicit_attn.studies.spins.measures import contact_precision


@pytest.fixture(scope="module")
def sets() -> dict[str, Puzzles]:
    return boards_and_puzzles(8, 5, [30, 40], "generated", seed=0).test


def test_puzzles_have_the_clues_asked_for(sets: dict[str, Puzzles]) -> None:
    for clues in (30, 40):
        puzzles, solutions = sets[str(clues)]
        assert bool(((puzzles != 0).sum(1) == clues).all())
        assert torch.equal(puzzles[puzzles != 0], solutions[puzzles != 0])
        assert bool(solved(solutions).all())
    assert set(sets) == {"30", "40", MIXED}
    assert len((sets[MIXED].puzzles != 0).sum(1).unique()) > 1


def test_too_few_clues_are_refused() -> None:
    with pytest.raises(ValueError, match=r"clues must be >= 2\d"):
        boards_and_puzzles(2, 2, [17], "generated", seed=0)
    some = boards_and_puzzles(2, 2, [17, 40], "generated", seed=0, mixed=False)
    assert set(some.test) == {"40"}


def test_solved_boards_differ() -> None:
    name, boards = solved_boards(5, "generated", 0)
    assert name == "generated boards" and len(boards.unique(dim=0)) == 5
    assert bool(solved(boards).all())


def test_singles_are_never_wrong_and_find_what_logic_finds(sets: dict[str, Puzzles]) -> None:
    puzzles, solutions = sets[MIXED]
    found = solve_by_singles(puzzles)
    assert torch.equal(found[found != 0], solutions[found != 0])
    assert torch.equal(found[puzzles != 0], puzzles[puzzles != 0])
    # A cell whose other digits are all in its row, column and box; and nothing from nothing.
    full = solutions[:1].clone()
    full[0, 40] = 0
    assert torch.equal(solve_by_singles(full), solutions[:1])
    assert not bool(solve_by_singles(torch.zeros(1, 81, dtype=torch.long)).any())


def test_hidden_singles_are_found() -> None:
    """The 5 of the first row can only be in its first cell; no cell has one digit left."""
    puzzle = torch.zeros(1, 9, 9, dtype=torch.long)
    for row, column in ((1, 3), (2, 6), (3, 1), (6, 2)):
        puzzle[0, row, column] = 5
    assert len(solve_sudoku(puzzle.flatten().tolist(), most=1)) == 1
    assert solve_by_singles(puzzle.view(1, 81))[0, 0] == 5


def test_shares_are_those_of_the_answers(sets: dict[str, Puzzles]) -> None:
    puzzles, solutions = sets["40"]
    half, unknown = solutions.clone(), puzzles == 0
    half[::2] = torch.where(unknown, half % 9 + 1, half)[::2]
    table = compare({"40": sets["40"]}, {"half": lambda asked: half}, lambda what: None)
    right = (half == solutions) & unknown
    assert table[0]["cells"] == pytest.approx((right.sum() / unknown.sum()).item())
    wanted = (right == unknown).all(1).double().mean().item()
    assert table[0]["solved"] == pytest.approx(wanted) and wanted < 1
    example = one_solved(sets["40"], lambda asked: half)
    assert torch.equal(example.filled, example.solution)


def test_counting_is_by_chance_where_no_board_tells_pairs_apart() -> None:
    _, boards = solved_boards(3, "generated", 0)
    equal = (boards.unsqueeze(2) == boards.unsqueeze(1)).double()
    torch.testing.assert_close(equal_share(boards), equal.mean(0))
    never = ~equal.bool().any(0)
    pairs = sudoku_pairs()
    assert bool(never[pairs].all())
    precision = contact_precision(-equal_share(boards), pairs)
    assert precision == pytest.approx(810 / int(never.triu(1).sum()))


def test_an_unknown_source_is_refused() -> None:
    assert source("generated") == "generated"
    with pytest.raises(argparse.ArgumentTypeError, match="one of"):
        source("none")

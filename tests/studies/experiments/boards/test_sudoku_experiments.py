"""The parts of the Sudoku experiments: boards, logic, counts."""

from __future__ import annotations

import argparse

import pytest
import torch

from implicit_attn.data import solve_sudoku
from implicit_attn.data.sudoku_boards import solved, unique_puzzles
from implicit_attn.models import sudoku_pairs
from implicit_attn.studies.experiments.boards.commands import source
from implicit_attn.studies.experiments.boards.graph import equal_share
from implicit_attn.studies.experiments.boards.puzzles import (
    MIXED,
    Puzzles,
    boards_and_puzzles,
    generated_puzzles,
    solved_boards,
)
from implicit_attn.studies.experiments.boards.singles import solve_by_singles
from implicit_attn.studies.experiments.boards.solving import (
    BARE,
    LEARNED,
    POTTS,
    RULES,
    compare,
    one_solved,
    train_couplings,
)
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


@pytest.mark.parametrize("seed", [0, 3])
def test_boards_to_learn_from_and_puzzles_share_none(seed: int) -> None:
    boards = boards_and_puzzles(6, 4, [40], "generated", seed=seed)
    both = torch.cat([boards.train, boards.test[MIXED].solutions])
    assert len(both) == 10 == len(both.unique(dim=0))
    # Not even with the same random numbers, from which the first board would be the same.
    assert not torch.equal(solved_boards(1, "generated", seed)[1], unique_puzzles(1, seed)[1])


def test_generated_puzzles_are_boards_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("implicit_attn.studies.experiments.boards.puzzles.MOST_BASES", 3)
    puzzles, solutions = generated_puzzles(7, seed=1)
    assert torch.equal(solutions[:3], unique_puzzles(3, 1)[1])
    assert len(solutions.unique(dim=0)) == 7 and bool(solved(solutions).all())
    assert torch.equal(puzzles[puzzles != 0], solutions[puzzles != 0])
    clues = (puzzles != 0).sum(1)
    assert torch.equal(clues[3:6], clues[:3])  # the fourth is the first under a symmetry


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


def test_the_penalty_is_that_of_the_first_head_alone() -> None:
    _, boards = solved_boards(12, "generated", 0)
    learned = train_couplings(boards[:8], boards[8:], 3, 0.01, 0, lambda what: None)
    assert set(learned.couplings) == {LEARNED, BARE, POTTS, RULES}
    assert [row["l2"] for row in learned.fits] == [0.01, 0.0, 0.0]
    with_penalty, without, _ = (row["held_out"] for row in learned.fits)
    assert without < with_penalty < 2.2  # ln 9: nothing learned
    same = train_couplings(boards[:8], boards[8:], 3, 0.0, 0, lambda what: None)
    assert same.fits[0]["held_out"] == same.fits[1]["held_out"] == without


def test_an_unknown_source_is_refused() -> None:
    assert source("generated") == "generated"
    with pytest.raises(argparse.ArgumentTypeError, match="one of"):
        source("none")

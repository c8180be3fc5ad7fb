"""Sudoku by belief propagation: the graph of couplings, and what is solved."""

from __future__ import annotations

import pytest
import torch

from implicit_attn.models import SudokuPotts
from implicit_attn.studies.experiments.boards.belief import (
    DigitPairs,
    belief_methods,
    decimated,
    propagated,
)
from implicit_attn.studies.experiments.boards.commands import graph
from implicit_attn.studies.experiments.boards.puzzles import boards_and_puzzles
from implicit_attn.studies.experiments.boards.singles import solve_by_singles


def test_soft_couplings_made_hard_are_the_rules() -> None:
    rules, hard = (
        DigitPairs.of_rules(),
        DigitPairs.of_solver(SudokuPotts.from_rules(), None),
    )
    assert torch.equal(rules.edges, hard.edges) and len(rules.edges) == 810
    assert torch.equal(rules.couplings, hard.couplings)
    soft = DigitPairs.of_solver(SudokuPotts.from_rules(), 9.0)
    assert torch.equal(soft.edges, rules.edges)
    torch.testing.assert_close(soft.couplings[0], 1 - 9.0 * torch.eye(9))


def test_decimation_solves_what_messages_alone_do_not() -> None:
    """And both keep the clues; on the rules, soft or hard."""
    sets = boards_and_puzzles(2, 8, [26, 34], "generated", seed=0, mixed=False).test
    puzzles, solutions = (torch.cat(parts) for parts in zip(*sets.values(), strict=True))
    rules = DigitPairs.of_rules()
    alone, more = propagated(rules, puzzles, 10), decimated(rules, puzzles, 10)
    soft = decimated(DigitPairs.of_solver(SudokuPotts.from_rules(), 4.0), puzzles[8:], 10)
    puzzled = [(boards == solutions).all(1) for boards in (alone, more)]
    assert bool((puzzled[1] >= puzzled[0]).all()) and puzzled[1].sum() >= puzzled[0].sum() + 2
    assert puzzled[1][8:].sum() >= 7 and (soft == solutions[8:]).all(1).sum() >= 6
    puzzles, alone, more = puzzles[8:], alone[8:], more[8:]
    for boards in (alone, more, soft):
        assert torch.equal(boards[puzzles > 0], puzzles[puzzles > 0])
        assert bool(((boards >= 1) & (boards <= 9)).all())


def test_methods_are_named() -> None:
    ways = belief_methods({"the rules": DigitPairs.of_rules()}, 5, 5)
    assert list(ways)[:2] == ["the rules: belief propagation", "the rules: with decimation"]
    assert ways[list(ways)[2]] is solve_by_singles
    with pytest.raises(Exception, match="must be one of rules, learned, got 'all'"):
        graph("all")

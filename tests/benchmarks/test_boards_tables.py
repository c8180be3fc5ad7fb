"""Hard boards have one solution each; the tables of a solver at its fixed points, and of every method."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from benchmarks.boards import hard_boards
from implicit_attn.data.sudoku import read_list, solve_sudoku, units


def test_bred_boards_are_minimal_and_have_one_solution(tmp_path: Path) -> None:
    puzzles, solutions, guesses = hard_boards.hard_boards(3, 3, 1)
    again = hard_boards.hard_boards(3, 3, 1)
    assert all(map(torch.equal, (puzzles, solutions, guesses), again))
    assert torch.equal(guesses, guesses.sort().values)
    for puzzle, solution in zip(puzzles.tolist(), solutions.tolist(), strict=True):
        assert solve_sudoku(puzzle) == [solution]
        chooser = random.Random(0)
        for cell in [cell for cell in range(81) if puzzle[cell]]:
            fewer = [*puzzle[:cell], 0, *puzzle[cell + 1 :]]
            assert len(hard_boards.search(fewer, 2, chooser)[0]) == 2
    out = tmp_path / "hard.npz"
    hard_boards.main(boards=3, rounds=3, seed=1, out=out)
    assert torch.equal(read_list(out)[0], puzzles)


def test_the_search_finds_what_is_there_and_counts_its_guesses() -> None:
    text = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
    puzzle, chooser = [int(sign) for sign in text], random.Random(0)
    found, guesses = hard_boards.search(puzzle, 2, chooser)
    assert found == solve_sudoku(puzzle) and guesses == 0  # singles alone
    assert len(hard_boards.search([0] * 81, 5, chooser)[0]) == 5
    assert hard_boards.search([1, 1, *puzzle[2:]], 2, chooser) == ([], 0)
    parts = hard_boards.bins(torch.tensor([0, 1, 2, 3, 10, 11, 50, 51, 900]))
    assert [int(each.sum()) for each in parts.values()] == [1, 2, 2, 2, 2]


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of a small board solver that has learned nothing."""
    pytest.importorskip("safetensors", reason="weights are read from a file")
    from implicit_attn.checkpoint import save_checkpoint
    from implicit_attn.models import build_model

    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path))  # boards are generated
    torch.manual_seed(0)
    specification = {
        "kind": "board-solver", "groups": units().tolist(), "cells": 81, "colours": 9,
        "features": 4, "width": 4, "iterations": 4, "window": 2,
    }  # fmt: skip
    path = tmp_path / "solver.safetensors"
    progress = {"settings": {"model": specification}}
    save_checkpoint(path, build_model(specification), progress=progress)
    return str(path)


def test_tables_of_a_solver_at_its_fixed_points(
    weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lightning_fabric", reason="of the training")
    from benchmarks.boards import fixed_points

    hard = tmp_path / "hard.npz"
    hard_boards.main(boards=2, rounds=0, out=hard)
    fixed_points.main(weights, hard, boards=2, answers=2, longest=8)
    text = capsys.readouterr().out
    assert "| extreme-like | 2 | 0.0 | 0.0 |" in text and "| complete | 2 |" in text
    assert "8 guesses" in text and "largest softmax > 0.99" in text and "fixed number" in text


def test_every_method_has_a_row(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="the examples need the extra [examples]")
    from benchmarks.boards import sudoku

    sudoku.main(weights, test=3, boards=2, train=9, fit_steps=2)
    lines = capsys.readouterr().out.splitlines()
    head, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line
    ]
    assert head[:2] == ["method", "boards"] and {"30", "34", "mixed"} <= set(head)
    names = [row[0] for row in rows[1:]]
    assert names[0] == "naked and hidden singles"
    assert "board solver, 1 iterations (0.25x)" in names
    assert "board solver, 64 iterations (16x)" in names
    assert "true graph: with decimation" in names and "learned, factored, annealed" in names
    shares = {row[0]: [float(cell) for cell in row[2:]] for row in rows[1:]}
    assert all(0 <= share <= 100 for each in shares.values() for share in each)
    assert shares["true graph: with decimation"][-2] == 100  # 34 givens
    assert shares["board solver, 64 iterations (16x)"] == [0] * len(head[2:])  # untrained

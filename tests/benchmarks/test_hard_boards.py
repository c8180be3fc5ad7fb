"""Hard boards: equal for equal seeds, one solution each; the tables of a solver at its fixed points."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

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


def test_tables_of_a_solver_at_its_fixed_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors", reason="weights are read from a file")
    pytest.importorskip("lightning_fabric", reason="of the training")
    from benchmarks.boards import fixed_points
    from implicit_attn.checkpoint import save_checkpoint
    from implicit_attn.models import build_model

    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path))  # boards are generated
    torch.manual_seed(0)
    specification = {
        "kind": "board-solver", "groups": units().tolist(), "cells": 81, "colours": 9,
        "features": 4, "width": 4, "iterations": 4, "window": 2,
    }  # fmt: skip
    path, hard = tmp_path / "solver.safetensors", tmp_path / "hard.npz"
    progress = {"settings": {"model": specification}}
    save_checkpoint(path, build_model(specification), progress=progress)
    hard_boards.main(boards=2, rounds=0, out=hard)
    sizes: Any = {"boards": 2, "answers": 2, "longest": 8}
    fixed_points.main(str(path), hard, **sizes)
    text = capsys.readouterr().out
    assert "| extreme-like | 2 | 0.0 | 0.0 |" in text and "| complete | 2 |" in text
    assert "8 guesses" in text and "largest softmax > 0.99" in text and "fixed number" in text

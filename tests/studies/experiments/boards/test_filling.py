"""The pictures of a solver that fills in a board, and of methods side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from implicit_attn.data.sudoku_boards import unique_puzzles, units
from implicit_attn.models import BoardSolver
from implicit_attn.studies.experiments.boards.belief import DigitPairs, belief_methods
from implicit_attn.studies.experiments.boards.figures import belief_figure
from implicit_attn.studies.experiments.boards.filling import (
    Frame,
    filling_animation,
    filling_figure,
    frames_of,
)
from implicit_attn.studies.tables import Table

pytest.importorskip("matplotlib", reason="needs the extra [examples]")
image = pytest.importorskip("PIL.Image", reason="needs the extra [examples]")


def frames() -> tuple[torch.Tensor, torch.Tensor, list[Frame]]:
    torch.manual_seed(0)
    model = BoardSolver(units().tolist(), features=4, width=8).eval()
    puzzles, solutions = unique_puzzles(1, 0)
    found = frames_of(model, puzzles[0], (1, 3, 6))
    for frame in found:
        logits = model(puzzles, iterations=frame.iterations)[0]
        chances = logits.softmax(-1)  # of an untrained model, with ties
        own = chances.gather(1, frame.digits[:, None] - 1)[:, 0]
        torch.testing.assert_close(own, chances.amax(-1))
        torch.testing.assert_close(frame.certainty, own)
    return puzzles[0], solutions[0], found


def test_frames_and_pictures(tmp_path: Path) -> None:
    puzzle, solution, found = frames()
    assert [frame.iterations for frame in found] == [1, 3, 6]
    curves = {"17": [0.0, 0.5, 0.9], "25": [0.2, 0.8, 1.0]}
    path = tmp_path / "a.png"
    filling_figure(path, curves, (1, 3, 6), 3, puzzle, solution, found[:2])
    with image.open(path) as picture:
        assert picture.size[0] > 800
    filling_animation(tmp_path / "a.gif", puzzle, solution, found)
    with image.open(tmp_path / "a.gif") as animation:
        assert animation.format == "GIF" and animation.n_frames == 3
        animation.seek(2)
        assert animation.info["duration"] == 2000


def test_every_method_of_three_models_has_a_curve(tmp_path: Path) -> None:
    """The learned couplings count twice where they are not the rules when made hard."""
    rules = DigitPairs.of_rules()
    models = {"rules": rules, "soft": rules, "hard": rules}
    table: Table = [
        {"clues": "30", "method": name, "solved": 0.5, "cells": 0.7}
        for name in belief_methods(models, 1, 1)
    ]
    belief_figure(tmp_path / "b.png", "Sudoku", table)
    assert (tmp_path / "b.png").is_file()

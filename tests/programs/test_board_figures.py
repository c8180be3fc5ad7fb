"""The pictures of a solver that fills in a board."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from implicit_attn.data.sudoku_boards import unique_puzzles, units
from implicit_attn.models import BoardSolver
from implicit_attn.programs.board_figures import filling_animation, filling_figure, frames_of

pytest.importorskip("matplotlib", reason="needs the extra [examples]")
image = pytest.importorskip("PIL.Image", reason="needs the extra [examples]")


def test_frames_and_pictures(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BoardSolver(units().tolist(), features=4, width=8).eval()
    (puzzle,), (solution,) = unique_puzzles(1, 0)
    found = frames_of(model, puzzle, (1, 3, 6))
    assert [frame.iterations for frame in found] == [1, 3, 6]
    for frame in found:
        chances = model(puzzle[None], iterations=frame.iterations)[0].softmax(-1)  # with ties
        own = chances.gather(1, frame.digits[:, None] - 1)[:, 0]
        torch.testing.assert_close(own, chances.amax(-1))
        torch.testing.assert_close(frame.certainty, own)
    curves = {"17": [0.0, 0.5, 0.9], "25": [0.2, 0.8, 1.0]}
    filling_figure(tmp_path / "a.png", curves, (1, 3, 6), 3, puzzle, solution, found[:2])
    with image.open(tmp_path / "a.png") as picture:
        assert picture.size[0] > 800
    filling_animation(tmp_path / "a.gif", puzzle, solution, found)
    with image.open(tmp_path / "a.gif") as animation:
        assert animation.format == "GIF" and animation.n_frames == 3
        animation.seek(2)
        assert animation.info["duration"] == 2000

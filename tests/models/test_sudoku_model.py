"""The Sudoku model around every backbone."""

from __future__ import annotations

import pytest
import torch

from implicit_attn.models import HyperSET, SudokuModel
from implicit_attn.models.images import grid_positions

PUZZLES = torch.randint(0, 10, (3, 81), generator=torch.Generator().manual_seed(0))


def test_a_cell_sees_the_others_and_its_place() -> None:
    torch.manual_seed(0)
    model = SudokuModel(HyperSET(8, 2, 8, iterations=2, initial_step=0.3, time_dim=8))
    with torch.no_grad():
        for parameter in (model.digits.weight, model.position):
            parameter.mul_(50)
    changed = PUZZLES.clone()
    changed[:, 80] = (changed[:, 80] + 1) % 10
    before, after = model(PUZZLES), model(changed)
    assert (before - after).abs().amax((0, 2)).min() > 1e-6
    empty = model(torch.zeros(1, 81, dtype=torch.int64))
    assert (empty[0, 0] - empty[0, 1]).abs().max() > 1e-3


def test_positions_that_start_from_units() -> None:
    """Cells of a row, a column or a box are alike; those that share nothing are not."""
    torch.manual_seed(0)
    model = SudokuModel(HyperSET(512, 2, 8, time_dim=8), start="units")
    places = torch.nn.functional.normalize(model.position.detach(), dim=1)
    likeness = (places @ places.T)[0]
    assert likeness[1] == pytest.approx(2 / 3, abs=0.15)  # row and box
    assert likeness[8] == pytest.approx(1 / 3, abs=0.15)  # row
    assert likeness[80] == pytest.approx(0, abs=0.15)
    assert model.position.square().mean().sqrt().item() == pytest.approx(0.02, rel=0.1)


def test_positions_and_norm_of_the_official_code() -> None:
    torch.manual_seed(0)
    model = SudokuModel(HyperSET(8, 2, 8, time_dim=8), positions="sincos", final_norm="rms")
    learned = SudokuModel(HyperSET(8, 2, 8, time_dim=8))
    assert isinstance(model.norm, torch.nn.RMSNorm) and isinstance(learned.norm, torch.nn.LayerNorm)
    assert set(learned.state_dict()) - set(model.state_dict()) == {"position", "norm.bias"}
    places = model.tokens(torch.zeros(1, 81, dtype=torch.int64))[0] - model.digits.weight[0]
    assert torch.allclose(places, grid_positions(9, 8), atol=1e-6)

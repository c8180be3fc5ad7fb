"""Two tiny runs of masked images, tabulated and drawn; guesses of hidden pixels by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from implicit_attn.cli import main

pytest.importorskip("tyro", reason="the gallery needs the extra [examples]")
PLACE = Path(__file__).resolve().parents[2] / "examples"
NAN = torch.nan


@pytest.fixture
def example(load: Callable[[Path], ModuleType]) -> ModuleType:
    return load(PLACE / "attention/masked_images.py")


def test_two_runs(example: ModuleType, load: Callable[[Path], ModuleType], tmp_path: Path) -> None:
    small = "--limit 64 --epochs 1 --test 9 --iterations 4 --options dim=8 heads=2 width=8"
    runs = [str(tmp_path / f"run-{seed}") for seed in range(2)]
    for seed, out in enumerate(runs):
        main([*f"train masked-images {small} --seed {seed}".split(), "--out", out])
    words = ["--runs", *runs, "--images", "2", "--out", str(tmp_path)]
    tables = load(PLACE / "runner.py").run(example.masked_images, words)
    assert [row["seed"] for row in tables["errors"]] == [0] * 6 + [1] * 6
    assert len(tables["fillings"]) == 5
    assert (tmp_path / "masked-images" / "masked-images.png").stat().st_size > 10_000


def test_the_nearest_visible_pixels_are_averaged(example: ModuleType) -> None:
    """By hand: of (0, 0) the two neighbours; (1, 2) is sqrt 2 from (0, 1), (2, 2) sqrt 5 from both."""
    image = torch.tensor([[NAN, 2.0, NAN], [4.0, NAN, NAN], [NAN, NAN, NAN]]).view(1, 1, 3, 3)
    filled = example.fill("nearest visible pixel", image, image)[0, 0]
    assert torch.allclose(filled, torch.tensor([[3.0, 2, 2], [4, 3, 2], [4, 4, 3]]))


def test_the_other_guesses(example: ModuleType) -> None:
    """A training image is found; the Gaussian's is ``mean_h + C_hv C_vv^-1 (x_v - mean_v)``."""
    train = torch.rand(40, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    shown = train[3:5].clone()
    shown[:, 0, 0, 0] = NAN
    assert torch.equal(example.fill("nearest training image", train, shown), train[3:5])
    flat: Tensor = train.flatten(1).double()
    mean, c = flat.mean(0), torch.cov(flat.T)
    c = c + 0.01 * c.diagonal().mean() * torch.eye(4).double()
    weights = torch.linalg.solve(c[1:, 1:], c[1:, 0])
    wanted = mean[0] + (shown.flatten(1)[:, 1:].double() - mean[1:]) @ weights
    found = example.fill("Gaussian, linear", train, shown)[:, 0, 0, 0]
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-5)

"""Models around a backbone: image classifiers, hidden patches, Sudoku."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.data.images import hide_patches, split_patches
from implicit_attn.models import (
    BACKBONES,
    HyperSET,
    ImageClassifier,
    MaskedImageModel,
    SudokuModel,
    build_model,
)
from implicit_attn.models.around import PatchEmbedding, grid_positions, sinusoidal_positions

# The image classifier around a backbone: patches, positions, readouts, mistakes, learning.


DIM = 12


def images(batch: int = 3, channels: int = 1, size: int = 8, seed: int = 0) -> Tensor:
    return torch.rand(batch, channels, size, size, generator=torch.Generator().manual_seed(seed))


def build(size: int = 8, channels: int = 1, classes: int = 5, **options: Any) -> ImageClassifier:
    torch.manual_seed(0)
    backbone = HyperSET(DIM, 3, 16, iterations=2, step_size="fixed")
    settings: dict[str, Any] = {"patch": 2} | options
    return ImageClassifier(backbone, size, channels, classes, **settings)


def test_patches_are_those_of_the_image() -> None:
    """Token k holds patch k, row by row, as a convolution with that stride has it."""
    torch.manual_seed(0)
    embed = PatchEmbedding(3, 2, DIM)
    x = images(2, 3, 6)
    weight = embed.linear.weight.view(DIM, 3, 2, 2)
    expected = F.conv2d(x, weight, embed.linear.bias, stride=2).flatten(2).mT
    assert torch.allclose(embed(x), expected, atol=1e-6)


def test_the_norm_of_pixels() -> None:
    """Neither the brightness nor the contrast of a patch matters; the weights learn."""
    torch.manual_seed(0)
    model = build(size=6, patch=2, pixel_norm=True)
    x = images(2, 1, 6)
    cells = x.unfold(2, 2, 2).unfold(3, 2, 2)
    cells = cells - cells.mean((-1, -2), keepdim=True)
    cells = cells / (cells.var((-1, -2), correction=0, keepdim=True) + 1e-5).sqrt()
    embed: Any = model.embed
    expected = embed.linear(cells.movedim(1, 3).flatten(3).flatten(1, 2))
    assert torch.allclose(embed(x), expected, atol=1e-5)
    model(x).square().sum().backward()
    assert embed.norm.weight.grad.abs().max() > 0
    assert not any(key.startswith("embed.norm") for key in build().state_dict())
    with pytest.raises(ValueError, match="pixel_norm must be False for the stem 'conv', got True"):
        build(stem="conv", pixel_norm=True)


def test_grid_positions() -> None:
    table = grid_positions(3, 8)
    for row in range(3):
        for column in range(3):
            angles = [(column, 1.0), (column, 0.01), (row, 1.0), (row, 0.01)]
            sines = [math.sin(place * f) for place, f in angles]
            cosines = [math.cos(place * f) for place, f in angles]
            expected = torch.tensor([*sines[:2], *cosines[:2], *sines[2:], *cosines[2:]])
            assert torch.allclose(table[3 * row + column], expected, atol=1e-6)
    with pytest.raises(
        ValueError, match="dim must be a multiple of 4 for positions of a grid, got 6"
    ):
        grid_positions(3, 6)


def test_sinusoidal_positions() -> None:
    table = sinusoidal_positions(20, 8)
    for place in (0, 1, 7, 19):
        for channel in range(8):
            angle = place / 10_000 ** (2 * (channel // 2) / 8)
            expected = math.sin(angle) if channel % 2 == 0 else math.cos(angle)
            assert table[place, channel].item() == pytest.approx(expected, abs=1e-6)
    model = build()
    assert "position" not in model.state_dict()
    plain = build(positions="learned")
    plain.load_state_dict(model.state_dict() | {"position": torch.zeros(17, DIM)})
    difference = model.tokens(images()) - plain.tokens(images())
    expected = sinusoidal_positions(17, DIM).expand(3, 17, DIM)
    assert torch.allclose(difference, expected, atol=1e-6)


def test_the_patch_divides_the_image() -> None:
    with pytest.raises(ValueError, match="patch must divide image_size=8, got 3"):
        build(patch=3)


# The model of hidden patches, around every backbone.


IMAGES = torch.rand(3, 2, 6, 6, generator=torch.Generator().manual_seed(0))
HIDDEN = torch.tensor([[1, 0, 0, 1, 0, 0, 0, 0, 1], [0] * 9, [1] * 8 + [0]]).bool()


class Echo(nn.Module):
    """A backbone that returns its tokens and remembers what it was asked for."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.dim, self.asked = dim, None

    def forward(self, x: Tensor, *, iterations: Any = None) -> Tensor:
        self.asked = iterations
        return x


def made(name: str) -> Any:
    layer = {"on_failure": "ignore"} if BACKBONES[name].solves else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_model(specification(name), layer=layer)


def test_a_token_is_that_of_its_patch_or_the_mask_token() -> None:
    model = MaskedImageModel(Echo(), 6, 2, patch=2)
    x = model.tokens(hide_patches(IMAGES, HIDDEN, 2))
    visible = model.embed(IMAGES) + model.position
    hidden = (model.mask_token + model.position).expand_as(x)
    assert torch.equal(x[~HIDDEN], visible[~HIDDEN])
    assert torch.equal(x[HIDDEN], hidden[HIDDEN])
    pixels = split_patches(model(IMAGES), 2)
    assert torch.allclose(pixels, model.head(model.norm(visible)), atol=1e-6)


def test_a_prediction_depends_on_the_visible_patches() -> None:
    model, other = made("hyperset").double(), IMAGES.double()
    other[0, :, 2:4, 0:2] += 0.5  # patch 3, hidden in the first image
    shown, same = (hide_patches(each.double(), HIDDEN, 2) for each in (IMAGES, other))
    nn.init.normal_(model.backbone.layers[0].step_sizes.last.weight)
    assert torch.equal(model(shown), model(same))
    other[0, :, 2:4, 2:4] += 0.5  # patch 4, visible
    moved = (model(hide_patches(other, HIDDEN, 2)) - model(shown)).abs().amax((1, 2, 3))
    assert moved[0] > 1e-3 and moved[1:].max() == 0


def test_positions_say_row_and_column() -> None:
    constant = MaskedImageModel(Echo(12), 10, 2, patch=2, positions="sinusoidal")
    places = constant.get_buffer("position").view(5, 5, 12)
    assert torch.equal(places[..., :6], places[:, :1, :6].expand(5, 5, 6))
    assert torch.equal(places[..., 6:], places[:1, :, 6:].expand(5, 5, 6))
    apart = torch.cdist(places.view(25, 12), places.view(25, 12)) + 9 * torch.eye(25)
    assert apart.min() > 0.1
    learned = MaskedImageModel(Echo(), 6, 2, patch=2)
    assert learned.get_parameter("position").shape == (9, 8)


def specification(name: str) -> dict[str, Any]:
    backbone: dict[str, Any] = {"name": name, "dim": 8, "heads": 2, "iterations": 3}
    if name == "hyperset":  # without it the untrained layer is the identity
        backbone["initial_step"] = 0.3
    sizes = {"image_size": 6, "channels": 2, "patch": 2}
    return {"kind": "masked-images", **sizes, "backbone": backbone}


# The Sudoku model around every backbone.


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


def test_positions_and_norm_of_the_official_code() -> None:
    torch.manual_seed(0)
    model = SudokuModel(HyperSET(8, 2, 8, time_dim=8), positions="sincos", final_norm="rms")
    learned = SudokuModel(HyperSET(8, 2, 8, time_dim=8))
    assert isinstance(model.norm, torch.nn.RMSNorm) and isinstance(learned.norm, torch.nn.LayerNorm)
    assert set(learned.state_dict()) - set(model.state_dict()) == {"position", "norm.bias"}
    places = model.tokens(torch.zeros(1, 81, dtype=torch.int64))[0] - model.digits.weight[0]
    assert torch.allclose(places, grid_positions(9, 8), atol=1e-6)

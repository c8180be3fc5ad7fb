"""The image classifier around a backbone: patches, positions, readouts, mistakes, learning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.models import HyperSET, ImageClassifier
from implicit_attn.models.images import PatchEmbedding, grid_positions, sinusoidal_positions

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


def test_what_is_read() -> None:
    z = torch.randn(2, 17, DIM, generator=torch.Generator().manual_seed(0))
    other = z.clone()
    other[:, 1:] += torch.randn(2, 16, DIM, generator=torch.Generator().manual_seed(1))
    by_class, by_mean = build(), build(readout="mean")
    assert torch.equal(by_class.classify(z), by_class.classify(other))
    assert not torch.allclose(by_mean.classify(z[:, 1:]), by_mean.classify(other[:, 1:]), atol=1e-3)
    expected = by_mean.head(by_mean.norm(z[:, 1:]).mean(1))
    assert torch.allclose(by_mean.classify(z[:, 1:]), expected)


def test_the_patch_divides_the_image() -> None:
    with pytest.raises(ValueError, match="patch must divide image_size=8, got 3"):
        build(patch=3)

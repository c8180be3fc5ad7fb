"""Random affine maps of images: known cases, repeatability, bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_attn.data import RandomAffine, epoch_generator


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(batch: int = 4) -> Tensor:
    """A blob in the middle, so that nothing leaves the image."""
    x = torch.zeros(batch, 2, 28, 28)
    x[:, :, 10:18, 12:16] = torch.rand(batch, 2, 8, 4, generator=generator(1)) + 0.5
    return x


def centre(x: Tensor) -> Tensor:
    """Centre of mass in pixels, (B, 2): down, across."""
    mass = x.sum(1)
    places = torch.arange(28.0)
    down = (mass.sum(2) * places).sum(1) / mass.sum((1, 2))
    across = (mass.sum(1) * places).sum(1) / mass.sum((1, 2))
    return torch.stack([down, across], dim=1)


def test_no_change_is_the_identity() -> None:
    x = images()
    same = RandomAffine(rotation=0, scale=0, shear=0, shift=0)(x, generator())
    assert torch.allclose(same, x, atol=1e-5)


def test_shifts_move_by_at_most_the_bound_and_each_image_by_its_own() -> None:
    x = images(64)
    moved = centre(RandomAffine(rotation=0, scale=0, shear=0, shift=3)(x, generator())) - centre(x)
    assert moved.abs().max() <= 3 + 1e-3
    assert moved.abs().max() > 2
    assert moved.std(0).min() > 1  # uniform in [-3, 3]: 1.73
    assert (moved[0] - moved[1]).abs().max() > 0.01


def test_rotation_keeps_centre_and_mass() -> None:
    x = torch.zeros(8, 1, 28, 28)
    x[:, :, 6:22, 13:15] = 1.0  # a bar through the middle of the image
    turned = RandomAffine(rotation=30, scale=0, shear=0, shift=0)(x, generator())
    assert torch.allclose(centre(turned), centre(x), atol=0.05)
    assert torch.allclose(turned.sum((1, 2, 3)), x.sum((1, 2, 3)), rtol=0.02)
    assert (turned - x).abs().amax() > 0.5


def test_scale_changes_the_area() -> None:
    x = images(64)
    area = RandomAffine(rotation=0, scale=0.2, shear=0, shift=0)(x, generator()).sum((1, 2, 3))
    ratio = (area / x.sum((1, 2, 3))).sqrt()
    assert 1 / 1.2 - 0.01 <= ratio.min() < 0.9 and 1.1 < ratio.max() <= 1 / 0.8 + 0.01


def test_the_generator_decides() -> None:
    x, augment = images(), RandomAffine()
    assert torch.equal(augment(x, generator(3)), augment(x, generator(3)))
    assert not torch.equal(augment(x, generator(3)), augment(x, generator(4)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotation": -1.0}, "rotation must be finite and >= 0, got -1.0"),
        ({"shift": float("nan")}, "shift must be finite and >= 0, got nan"),
        ({"scale": 1.0}, "scale must be < 1, got 1.0"),
    ],
    ids=str,
)
def test_bad_bounds_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RandomAffine(**options)


def test_other_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"images must be floating \(B, C, H, W\)"):
        RandomAffine()(torch.zeros(3, 28, 28), generator())
    with pytest.raises(ValueError, match=r"torch.uint8 \(1, 1, 8, 8\)"):
        RandomAffine()(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), generator())


def test_generators_of_batches_are_streams_of_their_own() -> None:
    keys: list[tuple[int, ...]] = [
        (0, 0),
        (0, 1),
        (1, 0),
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (1, 0, 0),
    ]
    draws = [torch.rand(4, generator=epoch_generator(*key)) for key in keys]
    for i, first in enumerate(draws):
        assert torch.equal(first, torch.rand(4, generator=epoch_generator(*keys[i])))
        assert not any(torch.equal(first, second) for second in draws[i + 1 :])
    with pytest.raises(ValueError, match="batch must be >= 0, got -1"):
        epoch_generator(0, 0, -1)

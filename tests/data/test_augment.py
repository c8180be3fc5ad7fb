"""Augmentations: known cases, bounds, repeatability; crops against a loop over images and places."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.data import Compose, RandomAffine, RandomCrop, RandomFlip

IMAGES = torch.rand(64, 2, 5, 6, generator=torch.Generator().manual_seed(0))
AUGMENTS: list[Any] = [
    RandomAffine(),
    RandomCrop(2),
    RandomFlip(),
    Compose(RandomCrop(1), RandomFlip()),
]
still = partial(RandomAffine, rotation=0, scale=0, shear=0, shift=0)


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(batch: int) -> Tensor:
    """In the middle, so that nothing leaves the image."""
    x = torch.zeros(batch, 2, 28, 28)
    x[:, :, 10:18, 12:16] = torch.rand(batch, 2, 8, 4, generator=drawn(1)) + 0.5
    return x


def centre(x: Tensor) -> Tensor:
    """Centre of mass in pixels, (B, 2): down, across."""
    mass, places = x.sum(1), torch.arange(28.0)
    sums = torch.stack([(mass.sum(2) * places).sum(1), (mass.sum(1) * places).sum(1)], 1)
    return sums / mass.sum((1, 2))[:, None]


def test_shifts_move_by_at_most_the_bound_and_each_image_by_its_own() -> None:
    x = blobs(64)
    torch.testing.assert_close(still()(x, drawn()), x, rtol=0, atol=1e-5)
    moved = centre(still(shift=3)(x, drawn())) - centre(x)
    assert 2 < moved.abs().max() <= 3 + 1e-3
    assert moved.std(0).min() > 1  # uniform in [-3, 3]: 1.73
    assert (moved[0] - moved[1]).abs().max() > 0.01


def test_rotation_keeps_centre_and_mass_and_scale_changes_the_area() -> None:
    x = torch.zeros(8, 1, 28, 28)
    x[:, :, 6:22, 13:15] = 1.0  # a bar through the middle of the image
    turned = still(rotation=30)(x, drawn())
    torch.testing.assert_close(centre(turned), centre(x), rtol=0, atol=0.05)
    torch.testing.assert_close(turned.sum((1, 2, 3)), x.sum((1, 2, 3)), rtol=0.02, atol=0)
    assert (turned - x).abs().amax() > 0.5
    x = blobs(64)
    ratio = (still(scale=0.2)(x, drawn()).sum((1, 2, 3)) / x.sum((1, 2, 3))).sqrt()
    assert 1 / 1.2 - 0.01 <= ratio.min() < 0.9 and 1.1 < ratio.max() <= 1 / 0.8 + 0.01


def test_a_crop_is_one_of_the_windows_and_all_occur() -> None:
    padded, found = F.pad(IMAGES, 4 * [1]), set[tuple[int, int]]()
    for image, after in zip(padded, RandomCrop(1)(IMAGES, drawn()), strict=True):
        places = [(top, left) for top in range(3) for left in range(3)]
        same = [p for p in places if image[:, p[0] : p[0] + 5, p[1] : p[1] + 6].equal(after)]
        assert len(same) == 1
        found.update(same)
    assert len(found) == 9 and torch.equal(RandomCrop(0)(IMAGES, drawn()), IMAGES)


def test_flips() -> None:
    flipped = RandomFlip()(IMAGES, drawn())
    mirrored, kept = ((flipped == each).all(3).all(2).all(1) for each in (IMAGES.flip(3), IMAGES))
    assert (mirrored ^ kept).all() and 16 <= int(mirrored.sum()) <= 48
    assert torch.equal(RandomFlip(1.0)(IMAGES, drawn()), IMAGES.flip(3))
    assert torch.equal(RandomFlip(0.0)(IMAGES, drawn()), IMAGES)


@pytest.mark.parametrize("augment", AUGMENTS, ids=lambda a: type(a).__name__)
def test_augmentations_repeat_leave_their_input_alone_and_take_images_alone(augment: Any) -> None:
    before = IMAGES.clone()
    first = augment(IMAGES, drawn(1))
    assert torch.equal(first, augment(IMAGES, drawn(1)))
    assert not torch.equal(first, augment(IMAGES, drawn(2)))
    assert torch.equal(IMAGES, before)
    assert first.shape == IMAGES.shape and first.dtype == IMAGES.dtype
    for wrong in (IMAGES[0], (IMAGES * 255).byte()):
        with pytest.raises(ValueError, match=r"images must be floating \(B, C, H, W\)"):
            augment(wrong, drawn())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomAffine(rotation=-1.0), "rotation must be finite and >= 0, got -1.0"),
        (lambda: RandomAffine(shift=float("nan")), "shift must be finite and >= 0, got nan"),
        (lambda: RandomAffine(scale=1.0), "scale must be < 1, got 1.0"),
        (lambda: RandomCrop(-1), "padding must be >= 0, got -1"),
        (lambda: RandomFlip(float("nan")), r"probability must lie in \[0, 1\]"),
    ],
)
def test_bad_bounds_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()

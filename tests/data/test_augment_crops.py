"""Crops, flips and their composition, against a loop over images and places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.data import Compose, RandomAffine, RandomCrop, RandomFlip

IMAGES = torch.rand(64, 2, 5, 6, generator=torch.Generator().manual_seed(0))
AUGMENTS: list[Any] = [RandomCrop(2), RandomFlip(), Compose(RandomCrop(1), RandomFlip())]


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def windows(image: Tensor, padding: int) -> list[Tensor]:
    """All crops of a padded image (C, H, W), row by row."""
    padded = F.pad(image, 4 * [padding])
    height, width = image.shape[1:]
    return [
        padded[:, top : top + height, left : left + width]
        for top in range(2 * padding + 1)
        for left in range(2 * padding + 1)
    ]


def test_a_crop_is_one_of_the_windows_and_all_occur() -> None:
    cropped = RandomCrop(1)(IMAGES, drawn())
    found = []
    for before, after in zip(IMAGES, cropped, strict=True):
        same = [k for k, window in enumerate(windows(before, 1)) if torch.equal(window, after)]
        assert len(same) == 1
        found += same
    assert set(found) == set(range(9))
    assert torch.equal(RandomCrop(0)(IMAGES, drawn()), IMAGES)


def test_flips() -> None:
    flipped = RandomFlip()(IMAGES, drawn())
    mirrored = (flipped == IMAGES.flip(3)).all(3).all(2).all(1)
    kept = (flipped == IMAGES).all(3).all(2).all(1)
    assert (mirrored ^ kept).all()
    assert 16 <= int(mirrored.sum()) <= 48
    assert torch.equal(RandomFlip(1.0)(IMAGES, drawn()), IMAGES.flip(3))
    assert torch.equal(RandomFlip(0.0)(IMAGES, drawn()), IMAGES)


def test_a_composition_draws_in_turn_from_one_generator() -> None:
    generator = drawn(3)
    expected = RandomFlip()(RandomCrop(2)(IMAGES, generator), generator)
    assert torch.equal(Compose(RandomCrop(2), RandomFlip())(IMAGES, drawn(3)), expected)


@pytest.mark.parametrize("augment", AUGMENTS, ids=lambda a: type(a).__name__)
def test_augmentations_repeat_and_leave_their_input_alone(augment: Any) -> None:
    before = IMAGES.clone()
    first = augment(IMAGES, drawn(1))
    assert torch.equal(first, augment(IMAGES, drawn(1)))
    assert not torch.equal(first, augment(IMAGES, drawn(2)))
    assert torch.equal(IMAGES, before)
    assert first.shape == IMAGES.shape and first.dtype == IMAGES.dtype


@pytest.mark.parametrize("augment", [*AUGMENTS, RandomAffine()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("images", [IMAGES[0], (IMAGES * 255).byte()], ids=["rank", "dtype"])
def test_what_is_no_batch_of_images_is_refused(augment: Any, images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"images must be floating \(B, C, H, W\)"):
        augment(images, drawn())


@pytest.mark.parametrize(
    ("padding", "error", "message"),
    [
        (-1, ValueError, "padding must be >= 0, got -1"),
        (1.5, TypeError, r"padding must be an integer, got 1\.5"),
        (True, TypeError, "padding must be an integer, got True"),
    ],
)
def test_bad_padding(padding: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RandomCrop(padding)


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_bad_probability(probability: float) -> None:
    with pytest.raises(ValueError, match=r"probability must lie in \[0, 1\]"):
        RandomFlip(probability)

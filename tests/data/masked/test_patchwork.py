"""Images as patches, and hidden patches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from implicit_attn.data.patches import hidden_patches, hide_patches, join_patches, split_patches


def random_images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_a_patch_is_a_square_of_the_image() -> None:
    images = random_images(2, 3, 12, 12)
    patches = split_patches(images, 4)
    assert patches.shape == (2, 9, 48)
    for row in range(3):
        for column in range(3):
            part = images[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert torch.equal(patches[:, 3 * row + column], part.flatten(1))
    assert torch.equal(join_patches(patches, 4), images)


def test_what_is_hidden_is_found_again() -> None:
    images = random_images(5, 1, 8, 8)
    hidden = torch.rand(5, 16, generator=torch.Generator().manual_seed(1)) < 0.4
    shown = hide_patches(images, hidden, 2)
    assert torch.equal(hidden_patches(shown, 2), hidden)
    assert int(shown.isnan().sum()) == 4 * int(hidden.sum())
    assert torch.equal(shown[~shown.isnan()], images[~shown.isnan()])
    assert not images.isnan().any()  # they are left as they are
    images[0, 0, 0, 3] = torch.nan  # one pixel hides its patch
    assert hidden_patches(images, 2)[0].nonzero().tolist() == [[1]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: split_patches(torch.zeros(1, 1, 8, 6), 2), "patch must divide .* 8 x 6"),
        (lambda: split_patches(torch.zeros(1, 8, 8), 2), r"images must be .* \(1, 8, 8\)"),
        (lambda: join_patches(torch.zeros(1, 3, 4), 2), r"a square N, got \(1, 3, 4\)"),
        (lambda: join_patches(torch.zeros(4, 4), 2), r"pixels .* \(4, 4\)"),
        (
            lambda: hide_patches(torch.zeros(1, 1, 4, 4), torch.zeros(1, 4).long(), 2),
            r"hidden must be bool, got torch\.int64",
        ),
        (
            lambda: hide_patches(torch.zeros(2, 1, 4, 4), torch.zeros(2, 3).bool(), 2),
            r"hidden must have the shape \(2, 4\), got \(2, 3\)",
        ),
    ],
)
def test_mistakes_are_named(wrong: object, message: str) -> None:
    assert callable(wrong)
    with pytest.raises((TypeError, ValueError), match=message):
        wrong()

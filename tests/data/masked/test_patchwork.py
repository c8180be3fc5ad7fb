"""Images as patches, and hidden patches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from implicit_attn.data.images import hidden_patches, hide_patches, join_patches, split_patches


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


def test_patches_divide_a_square() -> None:
    with pytest.raises(ValueError, match=r"patch must divide .* 8 x 6"):
        split_patches(torch.zeros(1, 1, 8, 6), 2)

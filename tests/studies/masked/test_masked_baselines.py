"""Fillings that learn nothing, against closed forms and by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from implicit_attn.data.patches import hide_patches
from implicit_attn.studies.masked.baselines import (
    BASELINES,
    fill_gaussian,
    fill_nearest_image,
    fill_nearest_visible,
    fill_training_mean,
    fill_visible_mean,
)

NAN = torch.nan
TRAIN = torch.rand(40, 2, 4, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.rand(9, 2, 4, 4, generator=torch.Generator().manual_seed(1))
HIDDEN = torch.tensor([[1, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 0]]).bool().repeat(3, 1)
SHOWN = hide_patches(IMAGES, HIDDEN, 2)


@pytest.mark.parametrize("name", BASELINES)
def test_visible_pixels_stay_and_no_other_image_matters(name: str) -> None:
    filled = BASELINES[name](TRAIN, SHOWN)
    assert filled.shape == SHOWN.shape and filled.dtype == SHOWN.dtype
    assert torch.equal(filled[~SHOWN.isnan()], IMAGES[~SHOWN.isnan()])
    assert filled.isfinite().all()
    assert torch.allclose(BASELINES[name](TRAIN, SHOWN[4:5]), filled[4:5], atol=1e-6)


def test_means() -> None:
    images = torch.tensor([[[[1.0, 3.0], [NAN, 5.0]], [[0.0, 0.0], [NAN, 3.0]]]])
    assert fill_visible_mean(TRAIN, images)[0, :, 1, 0].tolist() == [3.0, 1.0]
    filled = fill_training_mean(TRAIN, SHOWN)
    mean = TRAIN.mean(0).expand_as(SHOWN)
    assert torch.equal(filled[SHOWN.isnan()], mean[SHOWN.isnan()])


def test_the_nearest_visible_pixels_are_averaged() -> None:
    """By hand: of (0, 0) the two neighbours, of (2, 2) the only pixel at distance 2."""
    image = torch.tensor([[NAN, 2.0, NAN], [4.0, NAN, NAN], [NAN, NAN, NAN]]).view(1, 1, 3, 3)
    filled = fill_nearest_visible(TRAIN, image)[0, 0]
    # (1, 2) is sqrt 2 from (0, 1) and 2 from (1, 0); (2, 2) is sqrt 5 from both.
    assert torch.allclose(filled, torch.tensor([[3.0, 2, 2], [4, 3, 2], [4, 4, 3]]))


def test_a_training_image_is_found_by_its_visible_pixels() -> None:
    shown = hide_patches(TRAIN[5:14] + 0.01, HIDDEN, 2)
    filled = fill_nearest_image(TRAIN, shown)
    assert torch.equal(filled[shown.isnan()], TRAIN[5:14][shown.isnan()])


def conditional_mean(train: Tensor, image: Tensor, ridge: float) -> Tensor:
    """``mean_h + C_hv C_vv^-1 (x_v - mean_v)``, the usual form."""
    flat, x = train.flatten(1).double(), image.flatten().double()
    hidden, mean, covariance = x.isnan(), flat.mean(0), torch.cov(flat.T)
    covariance = covariance + ridge * covariance.diagonal().mean() * torch.eye(len(x)).double()
    gain = covariance[hidden][:, ~hidden] @ covariance[~hidden][:, ~hidden].inverse()
    return mean[hidden] + gain @ (x - mean)[~hidden]


def test_the_gaussian_is_the_conditional_mean() -> None:
    images = SHOWN.double()
    filled = fill_gaussian(TRAIN, images, 0.03)
    for image, guess in zip(images, filled, strict=True):
        wanted = conditional_mean(TRAIN, image, 0.03)
        assert torch.allclose(guess[image.isnan()], wanted, atol=1e-12)


def test_the_gaussian_recovers_linear_images() -> None:
    """Images in a plane: two visible patches say all."""
    generator = torch.Generator().manual_seed(3)
    basis = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    images = (torch.randn(60, 2, generator=generator, dtype=torch.float64) @ basis).view(
        60, 1, 4, 4
    )
    shown = hide_patches(images[50:59], HIDDEN, 2)
    filled = fill_gaussian(images[:50], shown, 1e-9)
    assert torch.allclose(filled, images[50:59], atol=1e-5)


def test_constant_training_images_have_a_mean() -> None:
    filled = fill_gaussian(torch.full((5, 2, 4, 4), 0.25), SHOWN)
    assert torch.allclose(filled[SHOWN.isnan()], torch.tensor(0.25))


@pytest.mark.parametrize("ridge", [0.0, -1.0, NAN])
def test_a_ridge_is_positive(ridge: float) -> None:
    with pytest.raises(ValueError, match="ridge must be"):
        fill_gaussian(TRAIN, SHOWN, ridge)

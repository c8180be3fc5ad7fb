"""What a model of hidden patches has to beat: fillings that learn little or nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from solvers.core.checks import require_positive

CHUNK = 256  # test images that are compared with all training images at once


def fill_visible_mean(train: Tensor, images: Tensor) -> Tensor:
    """Each channel of a hidden pixel is the mean of the image's visible pixels in that channel."""
    mean = images.nanmean((2, 3), keepdim=True)
    return torch.where(images.isnan(), mean, images)


def fill_training_mean(train: Tensor, images: Tensor) -> Tensor:
    """Hidden pixels are those of the mean training image."""
    return torch.where(images.isnan(), train.mean(0), images)


def fill_nearest_visible(train: Tensor, images: Tensor) -> Tensor:
    """A hidden pixel is the mean of the visible pixels that are nearest to it in the image."""
    size, width = images.shape[2:]
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(width), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], 1).double().to(images.device)
    distances = torch.cdist(places, places)
    filled = []
    for pixels in images.flatten(2):  # (C, S^2) of an image; a pixel is hidden in all channels
        hidden = pixels.isnan().any(0)
        apart = distances[hidden][:, ~hidden]
        nearest = (apart <= apart.amin(1, keepdim=True) + 1e-9).to(pixels.dtype)
        guess = pixels.clone()
        guess[:, hidden] = pixels[:, ~hidden] @ (nearest / nearest.sum(1, keepdim=True)).T
        filled.append(guess)
    return torch.stack(filled).view_as(images)


def fill_nearest_image(train: Tensor, images: Tensor) -> Tensor:
    """Hidden pixels are those of the training image whose visible pixels are nearest."""
    known = train.flatten(1)
    squares = known.square().T
    guesses = []
    for part in images.flatten(1).split(CHUNK):
        visible = (~part.isnan()).to(part.dtype)
        seen = part.masked_fill(part.isnan(), 0.0)
        apart = visible @ squares - 2 * seen @ known.T
        guesses.append(known[apart.argmin(1)])
    return torch.where(images.isnan(), torch.cat(guesses).view_as(images), images)


def fill_gaussian(train: Tensor, images: Tensor, ridge: float = 0.01) -> Tensor:
    r"""Hidden pixels h are ``E[h | visible]`` of a Gaussian with the training images' moments ::

        mean_h - K_hh^-1 K_hv (x_v - mean_v),    K = (covariance + ridge v I)^-1

    v the mean variance of a pixel. It is the best linear reconstruction, of every mask at once.

    Raises:
        ValueError: ``ridge`` is not a finite number > 0.
    """
    flat = train.flatten(1).double()
    mean = flat.mean(0)
    covariance = torch.cov(flat.T)
    shift = require_positive("ridge", ridge) * covariance.diagonal().mean()
    # A constant training set has no variance; any shift then gives its mean.
    eye = torch.eye(len(mean), dtype=flat.dtype, device=flat.device)
    precision = torch.linalg.inv(covariance + shift.clamp_min(1e-12) * eye)
    filled = []
    for pixels in images.flatten(1).double():
        hidden = pixels.isnan()
        rows = precision[hidden]
        field = rows[:, ~hidden] @ (pixels[~hidden] - mean[~hidden])
        guess = pixels.clone()
        guess[hidden] = mean[hidden] - torch.linalg.solve(rows[:, hidden], field)
        filled.append(guess)
    return torch.stack(filled).to(images.dtype).view_as(images)


# Training images (M, C, S, S) and images (B, C, S, S) with NaN in hidden patches -> images.
BASELINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean of the visible pixels": fill_visible_mean,
    "mean training image": fill_training_mean,
    "nearest visible pixel": fill_nearest_visible,
    "nearest training image": fill_nearest_image,
    "Gaussian, linear": fill_gaussian,
}

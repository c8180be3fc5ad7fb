"""Random augmentations of training images, each drawn from a generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from solvers.core.checks import require_count, require_nonnegative


@dataclass(frozen=True)
class RandomAffine:
    """Each image rotated, scaled, sheared and shifted at random, by bilinear interpolation.

    The draws are uniform within plus and minus the bounds; pixels from outside the image are 0.

    Attributes:
        rotation: degrees.
        scale: relative, in [0, 1).
        shear: horizontal, pixels per pixel.
        shift: pixels, each way.

    Call: ``augment(images (B, C, H, W), generator) -> (B, C, H, W)``.
    """

    rotation: float = 10.0
    scale: float = 0.1
    shear: float = 0.1
    shift: float = 2.0

    def __post_init__(self) -> None:
        for name in ("rotation", "scale", "shear", "shift"):
            require_nonnegative(name, getattr(self, name))
        if self.scale >= 1:
            raise ValueError(f"scale must be < 1, got {self.scale!r}")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        batch, _, height, width = _image_shape(images)
        draws = torch.rand(5, batch, generator=generator).mul_(2).sub_(1).to(images)
        angle = draws[0] * math.radians(self.rotation)
        size = 1 + self.scale * draws[1]
        cosine, sine = angle.cos() * size, angle.sin() * size
        # affine_grid maps the output to the input, in units of half the image.
        across = draws[3] * (2 * self.shift / width)
        down = draws[4] * (2 * self.shift / height)
        first = torch.stack([cosine, self.shear * draws[2] - sine, across], dim=1)
        second = torch.stack([sine, cosine, down], dim=1)
        grid = F.affine_grid(torch.stack([first, second], dim=1), list(images.shape), False)
        return F.grid_sample(images, grid, align_corners=False)


@dataclass(frozen=True)
class RandomCrop:
    """Each image padded with 0, ``padding`` pixels on every side, and cut to its size at random.

    Call: ``augment(images (B, C, H, W), generator) -> (B, C, H, W)``.
    """

    padding: int = 4

    def __post_init__(self) -> None:
        require_count("padding", self.padding, low=0)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        batch, channels, height, width = _image_shape(images)
        places = torch.randint(2 * self.padding + 1, (2, batch, 1), generator=generator)
        places = places.to(images.device)
        rows = places[0] + torch.arange(height, device=images.device)  # (B, H)
        columns = places[1] + torch.arange(width, device=images.device)  # (B, W)
        padded = F.pad(images, 4 * [self.padding])
        padded = padded.gather(2, rows[:, None, :, None].expand(-1, channels, -1, padded.shape[3]))
        return padded.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1))


@dataclass(frozen=True)
class RandomFlip:
    """Each image mirrored left to right with a probability.

    Call: ``augment(images (B, C, H, W), generator) -> (B, C, H, W)``.
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability must lie in [0, 1], got {self.probability!r}")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        batch = _image_shape(images)[0]
        flipped = torch.rand(batch, 1, 1, 1, generator=generator) < self.probability
        return torch.where(flipped.to(images.device), images.flip(3), images)


class Compose:
    """Augmentations ``augment(images, generator)`` in order, drawn from the same generator."""

    def __init__(self, *augments: Callable[[Tensor, torch.Generator], Tensor]) -> None:
        self.augments = augments

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        for augment in self.augments:
            images = augment(images, generator)
        return images


def _image_shape(images: Tensor) -> tuple[int, int, int, int]:
    if images.dim() != 4 or not images.is_floating_point():
        raise ValueError(
            f"images must be floating (B, C, H, W), got {images.dtype} {tuple(images.shape)}"
        )
    batch, channels, height, width = images.shape
    return batch, channels, height, width

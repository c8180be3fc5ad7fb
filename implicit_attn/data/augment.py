"""Random changes of training images, in tensors, repeatable by their generator."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class RandomAffine:
    """Each image rotated, scaled, sheared and shifted at random, by bilinear interpolation.

    The draws are uniform within plus and minus the bounds; what comes from outside is 0.

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
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and >= 0, got {value!r}")
        if self.scale >= 1:
            raise ValueError(f"scale must be < 1, got {self.scale!r}")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        if images.dim() != 4 or not images.is_floating_point():
            raise ValueError(
                f"images must be floating (B, C, H, W), got {images.dtype} {tuple(images.shape)}"
            )
        batch, _, height, width = images.shape
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

"""The smallest training: ten images, a linear model that remembers its calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from implicit_attn.data import ImageData


def toy_data(train: int = 10) -> ImageData:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(train + 4, 1, 4, 4, generator=generator)
    labels = torch.arange(train + 4) % 3
    return ImageData("toy", 3, images[:train], labels[:train], images[train:], labels[train:])


class Recorder(nn.Module):
    """Remembers how it was called in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)
        self.iterations: list[int | None] = []
        self.images: list[Tensor] = []

    def forward(self, images: Tensor, iterations: int | None = None) -> Tensor:
        if self.training:
            self.iterations.append(iterations)
            self.images.append(images)
        return self.linear(images.flatten(1))

"""A multiscale equilibrium model, small: digits classified by the fixed point of two coupled resolutions.

    python examples/torchdeq/multiscale_digits.py --engine ours    # or torchdeq, or bridge: see engines.py

The state is a pair of feature maps, (B, C, 8, 8) and (B, 2 C, 4, 4). Every evaluation applies a residual
block at each resolution and then fuses them: the coarse map is brought up and the fine one down. All
resolutions reach their equilibrium together. The images are the 1,797 digits of scikit-learn.

Source: Bai, Koltun, Kolter, "Multiscale Deep Equilibrium Models" (2020), https://arxiv.org/abs/2006.08656.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import tyro
from engines import Metered, Record, engine, train
from engines import Options as Shared
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.data import load_digits

Pair = tuple[Tensor, Tensor]


@dataclass(kw_only=True)
class Options(Shared):
    """Digits classified by the fixed point of two coupled resolutions."""

    channels: int = 12  # of the fine resolution, an even number
    batch: int = 32


def normed(channels: int) -> nn.GroupNorm:
    """Batch norm would couple the samples of a batch; group norm does not."""
    return nn.GroupNorm(2, channels)


class Residual(nn.Module):
    """``relu(norm(z + norm(W2 relu(W1 z) + u)))`` at one resolution, W 3 x 3 convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(normed(channels) for _ in range(2))

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        branch = self.norms[0](self.second(F.relu(self.first(z))) + u)
        return F.relu(self.norms[1](z + branch))


class TwoScales(nn.Module):
    """``(fine, coarse) <- f((fine, coarse), u)``: a block at each resolution, then both fused.

    Shapes: fine (B, C, 8, 8), coarse (B, 2 C, 4, 4), and u is such a pair too.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fine, self.coarse = Residual(channels), Residual(2 * channels)
        self.up = nn.Conv2d(2 * channels, channels, 1, bias=False)
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.norm_fine, self.norm_coarse = normed(channels), normed(2 * channels)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.normal_(part.weight, std=0.05)
        for norm in (self.norm_fine, self.norm_coarse):
            nn.init.constant_(norm.weight, 0.2)  # small beside u: the untrained map contracts

    def forward(self, z: Sequence[Tensor], u: Pair) -> Pair:
        fine, coarse = self.fine(z[0], u[0]), self.coarse(z[1], u[1])
        up = F.interpolate(self.up(coarse), scale_factor=2.0, mode="nearest")
        down = self.down(fine)
        return F.relu(self.norm_fine(fine + up)), F.relu(self.norm_coarse(coarse + down))


class Classifier(nn.Module):
    """Stem, two resolutions in equilibrium, a linear head: images (B, 1, 8, 8) -> logits (B, 10)."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        channels = options.channels
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), normed(channels))
        self.halve = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.head = nn.Linear(channels + 16 * 2 * channels, 10)
        self.meter = Metered(TwoScales(channels))
        self.solved = engine(options, self.meter, lambda u: tuple(map(torch.zeros_like, u)))

    def losses(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """Mean cross entropy in nats; no penalty."""
        fine = self.stem(inputs)
        u = fine, self.halve(fine)
        z = self.solved(u)
        self.reached = self.solved.residual(z, u)
        features = torch.cat([z[0].mean((2, 3)), z[1].flatten(1)], dim=1)
        return F.cross_entropy(self.head(features), targets), 0.0


def run(options: Options, report: int = 10) -> Record:
    """Train for ``options.steps`` steps; the weights and the batches are those of ``options.seed``."""
    data = load_digits()
    torch.manual_seed(options.seed)
    model = Classifier(options)
    generator = torch.Generator().manual_seed(options.seed)

    def batch() -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(data.train_labels), (options.batch,), generator=generator)
        return data.train_images[chosen], data.train_labels[chosen]

    return train(model, batch, options, report)


if __name__ == "__main__":
    run(tyro.cli(Options))

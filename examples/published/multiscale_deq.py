"""Multiscale DEQ (Bai, Koltun, Kolter 2020) on digits: two resolutions in one equilibrium.

    python examples/published/multiscale_deq.py

The state is a dict of two feature maps. Each goes through a residual block and then adds the other. Group
norms replace batch norms, since every sample is a problem of its own. The paper uses Broyden's method.

Source: https://arxiv.org/abs/2006.08656, code https://github.com/locuslab/deq.
"""

from functools import partial

import torch
import tyro
from common import Row, begin, share, show, solved, train_on_digits
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn import DEQ
from implicit_attn.regularization import apply_norm

conv = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)


class Block(nn.Module):
    """``relu(norm(z + norm(conv(relu(conv(z))) + x)))`` at one resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = conv(channels, channels), conv(channels, channels)
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for _ in range(2))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        branch = self.norms[0](self.second(F.relu(self.first(z))) + x)
        return F.relu(self.norms[1](z + branch))


class Cell(nn.Module):
    """A block at each resolution, "fine" (B, C, 8, 8) and "coarse" (B, 2 C, 4, 4), then their fusion."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        sizes = {"fine": channels, "coarse": 2 * channels}
        self.blocks = nn.ModuleDict({name: Block(size) for name, size in sizes.items()})
        self.norms = nn.ModuleDict({name: nn.GroupNorm(4, size) for name, size in sizes.items()})
        self.up = nn.Conv2d(2 * channels, channels, 1, bias=False)
        self.down = conv(channels, 2 * channels, stride=2)
        for weight in (p for p in self.parameters() if p.dim() == 4):
            nn.init.normal_(weight, std=0.05)  # so that the untrained map contracts
        for norm in self.norms.children():
            nn.init.constant_(norm.get_parameter("weight"), 0.2)
        apply_norm(self)  # weight norm of the convolutions

    def forward(self, z: dict[str, Tensor], x: dict[str, Tensor]) -> dict[str, Tensor]:
        fine, coarse = (self.blocks[name](z[name], x[name]) for name in ("fine", "coarse"))
        up = F.interpolate(self.up(coarse), scale_factor=2.0)
        sums = {"fine": fine + up, "coarse": coarse + self.down(fine)}
        return {name: F.relu(self.norms[name](total)) for name, total in sums.items()}


class Classifier(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem, self.halve = conv(1, channels), conv(channels, 2 * channels, stride=2)
        self.layer = DEQ.from_update(
            Cell(channels), init=lambda x: {name: 0 * part for name, part in x.items()},
            tolerance=1e-3, max_steps=60, on_failure="ignore",
        )  # fmt: skip
        self.head = nn.Linear(channels + 32 * channels, 10)

    def forward(self, images: Tensor, solver: str | None = None) -> Tensor:
        fine = self.stem(images)
        z = self.layer({"fine": fine, "coarse": self.halve(fine)}, solver=solver)
        return self.head(torch.cat([z["fine"].mean((2, 3)), z["coarse"].flatten(1)], 1))


def main(channels: int = 12, steps: int = 150, seed: int = 0) -> list[Row]:
    """Train with the default solver, then solve the test set by Broyden's method and by the default."""
    begin(seed)
    model, rows = Classifier(channels), []
    images, labels = train_on_digits(model, steps, batch=32, rate=2e-3)
    for name, solver in (("Broyden, as published", "broyden"), ("layer", None)):
        logits = model(images, solver=solver)
        F.cross_entropy(logits, labels).backward()
        rows.append(solved(name, model.layer, accuracy=share(logits, labels)))
    return show(rows)


if __name__ == "__main__":
    tyro.cli(main)

"""Deep equilibrium imaging (Gilton, Ongie, Willett 2021): deblurring by a learned proximal step.

    python examples/published/deep_equilibrium_imaging.py

The restored image is the fixed point of ``z = R(z - eta A^T (A z - y))`` for a blur A, a blurred and
noisy image y and a network R, which is trained through the fixed point. The paper solves forward and
backward by Anderson's method with memory 5 and an absolute ridge of 1e-4, which torchdeq implements.

Source: https://arxiv.org/abs/2102.07944, code https://github.com/dgilton/deep_equilibrium_inverse.
"""

import torch
import tyro
from common import Row, begin, row, show, solved, train
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn import DEQ
from implicit_attn.data import load_digits
from implicit_attn.regularization import apply_norm
from solvers.torchdeq_bridge import TorchDEQ

SIZE, NOISE = 16, 0.02


def images(batch: Tensor) -> Tensor:
    """Digits (B, 1, 8, 8) in twice the resolution."""
    return F.interpolate(batch, size=SIZE, mode="bilinear", align_corners=False)


def blur(z: Tensor) -> Tensor:
    """Circular Gaussian blur of width 1.2 pixels; the kernel is even, so ``A^T = A``."""
    line = torch.exp(-torch.arange(-3.0, 4.0, dtype=z.dtype, device=z.device).square() / 2.88)
    kernel = torch.outer(line, line) / line.sum() ** 2
    return F.conv2d(F.pad(z, (3, 3, 3, 3), mode="circular"), kernel[None, None])


class Cell(nn.Module):
    """``R(z - eta A^T (A z - y))``; ``R(u) = (1 - a) u + a net(u)`` with a bounded residual network."""

    def __init__(self, channels: int, eta: float = 1.0) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(),
            nn.Conv2d(channels, 1, 3, padding=1),
        )  # fmt: skip
        apply_norm(self.net, "bound", target=1.0)
        self.eta, self.mix = eta, nn.Parameter(torch.tensor(0.1))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        u = z - self.eta * blur(blur(z) - y)
        return u + self.mix * (self.net(u) - u)


def psnr(z: Tensor, image: Tensor) -> float:
    """Peak signal-to-noise ratio in dB, the mean over images with values from 0 to 1."""
    error = (z - image).square().flatten(1).mean(1)
    return -10 * error.log10().mean().item()


def main(channels: int = 16, steps: int = 140, seed: int = 0) -> list[Row]:
    """Train with the layer, then restore test images by both ways of solving."""
    begin(seed)
    data, cell = load_digits(), Cell(channels)
    layer = DEQ.from_update(cell, tolerance=1e-4, max_steps=100)

    def measured(image: Tensor) -> Tensor:
        return blur(image) + NOISE * torch.randn_like(image)

    def loss() -> Tensor:
        image = images(data.train_images[torch.randint(len(data.train_images), (16,))])
        return (layer(measured(image)) - image).square().mean()

    train(cell.parameters(), loss, steps, rate=2e-3)
    image = images(data.test_images[:64])
    y, rows = measured(image), []
    rows.append(row("nothing: the blurred image", 0, "", "", psnr=psnr(y, image)))
    anderson = TorchDEQ("anderson", {"m": 5, "lam": 1e-4})
    for name, options in (("Anderson, as published", {"solver": anderson}), ("layer", {})):
        z = layer(y, on_failure="ignore", **options)
        (z - image).square().mean().backward()
        rows.append(solved(name, layer, psnr=psnr(z, image)))
    return show(rows)


if __name__ == "__main__":
    tyro.cli(main)

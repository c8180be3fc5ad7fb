"""Energy Transformer (Hoover et al. 2023) on digits, with and without a fixed point.

    python examples/published/energy_transformer.py

The published layer makes twelve steps ``z <- z - 0.1 dE/dg`` at ``g = LayerNorm(z)``, where E is the
energy of attention and of a Hopfield network. Without a term that pulls z back, the states keep growing
and there is no fixed point. With the quadratic term of the same theory, ``z <- x - dE/dg``, the update
has one, and the layer solves for it.

Source: https://arxiv.org/abs/2302.07253, code https://github.com/bhoov/energy-transformer-jax.
"""

import torch
import tyro
from common import Row, begin, row, share, show, solved, train_on_digits
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn import DEQ, ActivationStep
from implicit_attn.energies import Energy, LayerNormLagrangian, ReLUFeedForward, SoftmaxAttention
from implicit_attn.updates import FunctionUpdate, Update


def network(dim: int, heads: int) -> Energy:
    """Energy of attention and of a Hopfield network with 4 d memories."""
    attention = SoftmaxAttention(dim, heads, norm=None)
    return attention + ReLUFeedForward(dim, 4 * dim, norm=None, bias=False)


class Published(nn.Module):
    """``z - a dE/dg(LayerNorm(z))``."""

    def __init__(self, energy: Energy, step_size: float = 0.1) -> None:
        super().__init__()
        self.energy, self.step_size = energy, step_size

    def forward(self, z: Tensor) -> Tensor:
        return z - self.step_size * self.energy.grad(F.layer_norm(z, z.shape[-1:]))


class Classifier(nn.Module):
    """Embeds 2 x 2 patches, applies the layer, or a number of its steps, and reads all tokens."""

    def __init__(self, update: Update, dim: int, steps: int | None) -> None:
        super().__init__()
        self.embed, self.head, self.steps = nn.Linear(4, dim), nn.Linear(16 * dim, 10), steps
        self.position = nn.Parameter(0.5 * torch.randn(16, dim))
        self.layer = DEQ(update, tolerance=1e-3, max_steps=100, on_failure="ignore")

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(F.unfold(images, 2, stride=2).mT) + self.position
        layer = self.layer if self.steps is None else self.layer.unrolled(self.steps)
        z = layer(tokens)
        return self.head(F.layer_norm(z, z.shape[-1:]).flatten(1))


def main(dim: int = 32, heads: int = 4, steps: int = 120, seed: int = 0) -> list[Row]:
    """Train a classifier of digits in each way; the first is also solved until it converges."""
    begin(seed)
    published = Classifier(FunctionUpdate(Published(network(dim, heads))), dim, 12)
    images, labels = train_on_digits(published, steps, batch=32, rate=3e-3)
    measured = {"accuracy": share(published(images), labels)}
    rows = [row("12 steps, as published", 12, 12, "", **measured)]
    published.steps = None
    measured = {"accuracy": share(published(images), labels)}
    rows.append(solved("the same, to convergence", published.layer, **measured))
    step = ActivationStep(0.1 * network(dim, heads), LayerNormLagrangian())  # x must outweigh E
    model = Classifier(step, dim, None)
    train_on_digits(model, steps, batch=32, rate=3e-3)
    logits = model(images)
    F.cross_entropy(logits, labels).backward()
    return show([*rows, solved("layer, with decay", model.layer, accuracy=share(logits, labels))])


if __name__ == "__main__":
    tyro.cli(main)

"""Energy-Based Transformer (Gladstone et al. 2025): the next character is found by descending an energy.

    python examples/published/energy_based_transformer.py

For every position the state is a vector of logits z. A step descends a learned energy of the distribution
``p = softmax(z)`` given the previous characters, ``z <- p - alpha dE/dp``, with a learned step size alpha.
Training puts the cross entropy on the state after each of three steps and differentiates through each step,
so it needs second derivatives of the energy. The layer continues until the distributions do not change.

Source: https://arxiv.org/abs/2507.02092, code https://github.com/alexiglad/EBT.
"""

import torch
import tyro
from common import Row, begin, row, show, solved, train
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn import DEQ, FunctionEnergy
from implicit_attn.data import load_text


class NextEnergy(nn.Module):
    """``E(p; x)``: a candidate for each next character attends to the characters before it."""

    def __init__(self, vocabulary: int, dim: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(0.1 * torch.randn(length, dim))
        self.query, self.key = nn.Linear(2 * dim, dim), nn.Linear(dim, dim)
        self.value, self.out = nn.Linear(dim, dim), nn.Linear(3 * dim, 2 * dim)
        self.last = nn.Linear(2 * dim, 1)

    def forward(self, p: Tensor, x: Tensor) -> Tensor:
        candidate = p @ self.embedding.weight  # the embedding of a distribution
        context = self.embedding(x) + self.position[: x.shape[1]]
        query = self.query(torch.cat([candidate, context], -1))
        scores = query @ self.key(context).mT / query.shape[-1] ** 0.5
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        heard = scores.masked_fill(later, -torch.inf).softmax(-1) @ self.value(context)
        inner = F.silu(self.out(torch.cat([candidate, context, heard], -1)))
        return self.last(inner).sum((1, 2))


class Thinking(nn.Module):
    """``z <- p - alpha dE/dp(p, x)`` at ``p = softmax(z)``."""

    def __init__(self, energy: nn.Module, step_size: float) -> None:
        super().__init__()
        self.energy, self.alpha = FunctionEnergy(energy), nn.Parameter(torch.tensor(step_size))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        p = z.softmax(-1)
        return p - self.alpha.clamp(min=1e-4) * self.energy.grad(p, x)


def main(dim: int = 64, length: int = 32, steps: int = 600, seed: int = 0) -> list[Row]:
    """Train on the text of Python's help; the table has nats a character on held-out text."""
    begin(seed)
    text = load_text()
    size = len(text.alphabet)
    update = Thinking(NextEnergy(size, dim, length), step_size=10.0)
    layer = DEQ.from_update(update, init="zeros", tolerance=1e-3, max_steps=100)

    def batch(source: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        first = torch.randint(len(source) - length, (count, 1))
        window = source[first + torch.arange(length + 1)]
        return window[:, :-1], window[:, 1:], torch.randn(count, length, size)

    def nats(z: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), target.flatten())

    def loss() -> Tensor:
        x, target, noise = batch(text.train, 16)
        states = layer.supervised(x, segments=3, steps=1, z0=noise)
        return torch.stack([nats(z, target) for z in states]).mean()

    train(layer.parameters(), loss, steps, rate=3e-3)
    x, target, noise = batch(text.validation, 64)
    rows = []
    with torch.no_grad():
        for count in (1, 3, 10):
            value = nats(layer.unrolled(count)(x, z0=noise), target).item()
            rows.append(row(f"{count} plain steps", count, "", "", nats=value))
        z = layer(x, z0=noise)
    return show([*rows, solved("layer", layer, nats=nats(z, target).item())])


if __name__ == "__main__":
    tyro.cli(main)

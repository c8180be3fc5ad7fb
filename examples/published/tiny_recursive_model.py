"""Tiny Recursive Model (Jolicoeur-Martineau 2025) on 4 x 4 Sudoku: deep supervision of a pair of states.

    python examples/published/tiny_recursive_model.py

One small network refines a latent state six times and then the answer, ``z_L <- net(z_L + z_H + x)`` and
``z_H <- net(z_H + z_L)``. A supervision step is three such cycles, of which only the last has gradients,
and it starts from the detached states of the previous one: ``layer.supervised``. The published evaluation
makes a fixed number of supervision steps. The layer solves until the states do not change.

Source: https://arxiv.org/abs/2510.04871, code https://github.com/SamsungSAILMontreal/TinyRecursiveModels.
"""

import torch
import tyro
from common import Row, begin, row, show, solved
from generated import boards, puzzles
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn import DEQ

State = tuple[Tensor, Tensor]  # answer z_H and latent z_L, (B, 16, d)


class Cell(nn.Module):
    """One cycle of the pair; the network mixes tokens and then features, with norms after both."""

    def __init__(self, dim: int, latent_steps: int = 6) -> None:
        super().__init__()
        self.embedding, self.steps = nn.Embedding(5, dim), latent_steps
        self.position = nn.Parameter(0.1 * torch.randn(16, dim))
        self.tokens = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16))
        self.features = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def net(self, z: Tensor) -> Tensor:
        z = F.rms_norm(z + self.tokens(z.mT).mT, z.shape[-1:])
        return F.rms_norm(z + self.features(z), z.shape[-1:])

    def forward(self, z: State, given: Tensor) -> State:
        (answer, latent), x = z, self.embedding(given) + self.position
        for _ in range(self.steps):
            latent = self.net(latent + answer + x)
        return self.net(answer + latent), latent


def main(dim: int = 64, steps: int = 60, holes: int = 9, seed: int = 0) -> list[Row]:
    """Train on 200 boards, and test on puzzles of the other 88."""
    begin(seed)
    every, cell, head = boards()[torch.randperm(288)], Cell(dim), nn.Linear(dim, 5)
    zeros = lambda given: (torch.zeros(*given.shape, dim),) * 2  # noqa: E731
    layer = DEQ.from_update(cell, init=zeros, tolerance=1e-2, max_steps=96, on_failure="ignore")
    optimizer = torch.optim.AdamW([*cell.parameters(), *head.parameters()], lr=2e-3)
    for _ in range(steps):
        given, answer = puzzles(every[:200], every, 64, holes)
        for z in layer.supervised(given, segments=4, steps=3):
            optimizer.zero_grad()
            F.cross_entropy(head(z[0]).flatten(0, 1), answer.flatten()).backward()
            optimizer.step()
    given, answer = puzzles(every[200:], every, 256, holes)
    rows = []
    with torch.no_grad():
        for segments in (1, 4, 16):
            *_, z = layer.supervised(given, segments, steps=3)
            shares = measures(head(z[0]), answer)
            rows.append(row(f"{segments} supervision steps", 3 * segments, "", "", **shares))
        shares = measures(head(layer(given)[0]), answer)
    return show([*rows, solved("layer", layer, **shares)])


def measures(logits: Tensor, answer: Tensor) -> dict[str, float]:
    right = logits.argmax(-1) == answer
    shares = {"cells": right, "boards": right.all(1)}
    return {name: share.double().mean().item() for name, share in shares.items()}


if __name__ == "__main__":
    tyro.cli(main)

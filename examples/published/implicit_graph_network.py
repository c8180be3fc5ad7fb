"""Implicit graph neural network (Gu et al. 2020): labels that travel around directed rings.

    python examples/published/implicit_graph_network.py

The equilibrium ``X = relu(S X W^T + F V^T)`` of all nodes of a graph with edges S carries a label along
any number of edges, where two layers of graph convolution see two. The graph is one sample, ``X[None]``.
The paper keeps every row of W within an l1 norm of kappa, which makes the map a contraction, and solves
it and its adjoint by plain iteration.

Source: https://arxiv.org/abs/2009.06211, code https://github.com/SwiftieH/IGNN.
"""

from typing import Any

import torch
import tyro
from common import Row, begin, row, share, show, solved, train
from generated import rings
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn import DEQ


class Cell(nn.Module):
    """``relu(S X W^T + U)`` of graphs (B, n, d) with edges S (B, n, n); ``U`` is the input F V^T."""

    def __init__(self, dim: int, kappa: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(dim) + 0.5 * torch.randn(dim, dim) / dim)
        self.kappa = kappa

    @torch.no_grad()
    def project(self) -> None:
        """Scale rows of W with an l1 norm above kappa down to it."""
        norm = self.weight.abs().sum(1, keepdim=True)
        self.weight.mul_((self.kappa / norm).clamp(max=1.0))

    def forward(self, z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        edges, inputs = x
        return F.relu(edges @ z @ self.weight.T + inputs)


def main(length: int = 20, dim: int = 16, steps: int = 300, seed: int = 0) -> list[Row]:
    """Train on ten rings, test on twenty; the accuracy is that of the nodes just before the first one."""
    begin(seed)
    known, held = rings(10, length), rings(20, length)
    cell, inject, head = Cell(dim, kappa=0.98), nn.Linear(2, dim, bias=False), nn.Linear(dim, 2)
    layer = DEQ.from_update(cell, init=lambda x: torch.zeros_like(x[1]), max_steps=300)
    first, second = nn.Linear(2, dim), nn.Linear(dim, 2)

    def equilibrium(graph: tuple[Tensor, ...], **options: Any) -> Tensor:
        cell.project()
        inputs = graph[0][None], inject(graph[1])[None]
        return head(F.normalize(layer(inputs, **options)[0], dim=1))

    def convolutions(graph: tuple[Tensor, ...]) -> Tensor:
        edges, features, _ = graph
        return edges @ second(F.relu(edges @ first(features)))

    def accuracy(logits: Tensor) -> float:
        last = torch.arange(len(logits)) % length >= 3 * length // 4
        return share(logits[last], held[2][last])

    parts = (cell, inject, head), (first, second)
    for forward, modules in zip((equilibrium, convolutions), parts, strict=True):
        loss = lambda forward=forward: F.cross_entropy(forward(known), known[2])  # noqa: E731
        train([p for part in modules for p in part.parameters()], loss, steps, rate=1e-2)
    rows = []
    for name, solver in (("plain iteration, as published", "forward"), ("layer", None)):
        logits = equilibrium(held, solver=solver)
        F.cross_entropy(logits, held[2]).backward()
        rows.append(solved(name, layer, accuracy=accuracy(logits)))
    explicit = row("two graph convolutions", 2, 2, "", accuracy=accuracy(convolutions(held)))
    return show([*rows, explicit])


if __name__ == "__main__":
    tyro.cli(main)

"""Node classification on a graph from a few labels: nodes are tokens, edges are allowed pairs.

    python examples/integrations/graph_nodes.py

The nodes are noisy digits, connected to their nearest neighbours before adding noise. The baseline has blocks
without attention. To convert PyTorch Geometric's ``edge_index`` (2, E) to the mask of a graph of n nodes:
    excluded = torch.ones(n, n, dtype=torch.bool).fill_diagonal_(False)
    excluded[edge_index[1], edge_index[0]] = False  # row: query, column: key
"""

from typing import Any

import torch
import tyro
from sklearn.neighbors import kneighbors_graph
from torch import Tensor, nn

from implicit_attn import EquilibriumBlock
from implicit_attn.data import load_digits


def digits_graph(nodes: int, noise: float = 0.6) -> tuple[Tensor, Tensor, Tensor]:
    """Features (n, 64), classes (n,), and which pairs are excluded (n, n)."""
    data = load_digits().first(nodes)
    images = data.train_images.flatten(1)
    near = torch.from_numpy(kneighbors_graph(images, 6, include_self=True).toarray() > 0)
    noisy = images + noise * torch.randn(images.shape)
    return noisy, data.train_labels, ~(near | near.T)


class NodeClassifier(nn.Module):
    def __init__(self, features: int, classes: int, dim: int, attention: str | None) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(features, dim), nn.Linear(dim, classes)
        blocks = (EquilibriumBlock(dim, 4, attention=attention, dropout=0.3) for _ in range(2))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, excluded: Tensor | None = None) -> Tensor:
        x = self.embed(x)[None]  # a batch of one graph
        for block in self.blocks:
            x = block(x, excluded)
        return self.head(x)[0]


def train(model: nn.Module, graph: Any, y: Tensor, known: Tensor, steps: int) -> float:
    """Accuracy on the nodes whose class was not known; ``graph`` is x and excluded."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(*graph)[known], y[known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = model.eval()(*graph).argmax(1) == y
    return right[~known].double().mean().item()


def main(nodes: int = 400, labels: int = 4, steps: int = 60) -> dict[str, float]:
    torch.manual_seed(0)
    x, y, excluded = digits_graph(nodes)
    kind = nn.functional.one_hot(y, 10)
    known = (kind * kind.cumsum(0)).sum(1) <= labels  # the first ones of each class
    same = (y[:, None] == y)[~excluded].double().mean().item()
    print(f"{nodes} nodes, {known.sum()} labels, {same:.0%} of the edges within a class")
    found = {}
    for name, attention in (("each node alone", None), ("graph", "self")):
        model = NodeClassifier(64, 10, 32, attention)
        found[name] = train(model, (x, excluded) if attention else (x,), y, known, steps)
        print(f"{name}: {found[name]:.1%} of the other nodes")
    return found


if __name__ == "__main__":
    tyro.cli(main)

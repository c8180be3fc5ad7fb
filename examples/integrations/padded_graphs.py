"""PyTorch Geometric: batches of graphs of different sizes, padded, through an equilibrium layer.

    pip install ".[examples,integrations]"
    python examples/integrations/padded_graphs.py

Every graph is a directed chain. Only the features of its first node show the class, which all nodes have to
predict. Two graph convolutions carry it two nodes on; the equilibrium carries it to the end of any chain.
One graph is one sample of the layer: ``to_dense_batch`` pads the nodes and returns the mask, and
``to_dense_adj`` returns the matrices.
"""

from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric import data, utils  # pyright: ignore[reportMissingImports]
from torch_geometric.nn import GCN  # pyright: ignore[reportMissingImports]

from implicit_attn import DEQ


def chains(count: int, longest: int) -> Any:
    """Chains of 4 to ``longest`` nodes with features (N, 8), of which the first node's show the class."""
    graphs = []
    for size in torch.randint(4, longest + 1, (count,)).tolist():
        label, features = int(torch.randint(2, ())), 0.1 * torch.randn(size, 8)
        features[0, label] += 3.0
        edges, y = torch.arange(size).unfold(0, 2, 1).T, torch.full((size,), label)
        graphs.append(data.Data(x=features, edge_index=edges, y=y))
    return data.Batch.from_data_list(graphs)


class Equilibrium(nn.Module):
    """``z = tanh(A W z + x)`` of states (B, N, d), with matrices A (B, N, N) whose rows are receivers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, dim), nn.Linear(dim, 2)
        self.linear = nn.Linear(dim, dim, bias=False)
        nn.init.orthogonal_(self.linear.weight, gain=0.95)

        def update(z: Tensor, x: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
            return torch.tanh(x[0] @ self.linear(z) + x[1])

        self.layer = DEQ.from_update(update, init=lambda x: torch.zeros_like(x[1]), max_steps=100)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x, mask = utils.to_dense_batch(self.embed(x), batch)
        edges = utils.to_dense_adj(edge_index, batch).mT  # its rows are senders
        return self.head(self.layer((edges, x), mask)[mask])


def main(dim: int = 16, steps: int = 150, longest: int = 20) -> dict[str, Any]:
    torch.manual_seed(0)
    models = {"two convolutions": GCN(8, dim, 2, 2), "equilibrium": Equilibrium(dim)}
    test, found = chains(200, longest), {}
    for name, model in models.items():
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(steps):
            batch = chains(16, longest)
            logits = model(batch.x, batch.edge_index, batch=batch.batch)
            loss = F.cross_entropy(logits, batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = model(test.x, test.edge_index, batch=test.batch).argmax(1) == test.y
        found[name] = right.double().mean().item()
        print(f"{name}: {found[name]:.1%} of the nodes of chains with 4 to {longest} nodes")
    return {"accuracy": found, **models}


if __name__ == "__main__":
    tyro.cli(main)

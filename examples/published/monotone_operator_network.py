"""Monotone operator network (Winston, Kolter 2020) on digits: three ways to the same equilibrium.

    python examples/published/monotone_operator_network.py

The equilibrium ``z = relu(W z + U x + b)`` with ``W = (1 - m) I - A^T A + B - B^T`` is unique for any A
and B: I - W is strongly monotone. The paper solves it by splitting methods with a tuned step size.

Source: https://arxiv.org/abs/2006.08591, code https://github.com/locuslab/monotone_op_net.
"""

import torch
import tyro
from common import Row, begin, share, show, solved, train_on_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from implicit_attn import DEQ
from solvers import Implicit


class MonotoneWeight(nn.Module):
    """``W`` of A and B; the strong monotonicity of I - W is at least m = 0.1."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return 0.9 * torch.eye(len(a), dtype=a.dtype) - a.T @ a + b - b.T

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight, weight.clone()


class Cell(nn.Module):
    """``relu(W z + x)``; ``x`` is U x + b, computed once."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=False)
        parametrize.register_parametrization(self.linear, "weight", MonotoneWeight())

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return F.relu(self.linear(z) + x)


def peaceman_rachford(cell: Cell, step: float = 1.0) -> DEQ:
    """Reflected resolvents of relu and of I - W; the equilibrium is relu of the fixed point."""
    one = torch.eye(cell.linear.in_features, dtype=cell.linear.weight.dtype)
    resolvent = torch.linalg.inv(one + step * (one - cell.linear.weight))

    def update(u: Tensor, x: Tensor) -> Tensor:
        reflected = 2 * F.relu(u) - u
        return 2 * (reflected + step * x) @ resolvent.T - reflected

    return DEQ.from_update(update, init="zeros")


class Classifier(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inject, self.cell, self.head = nn.Linear(64, dim), Cell(dim), nn.Linear(dim, 10)
        self.layer = DEQ.from_update(self.cell, init="zeros", max_steps=200)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer(self.inject(images.flatten(1))))


def main(dim: int = 100, steps: int = 600, seed: int = 0) -> list[Row]:
    """Train with the layer, then solve the test set in each way, to a relative tolerance of 1e-4."""
    begin(seed)
    model, rows = Classifier(dim), []
    images, labels = train_on_digits(model, steps, batch=64, rate=3e-3)
    linear, x = model.cell.linear, model.inject(images.flatten(1))
    options = {"max_steps": 2000, "adjoint": Implicit(on_failure="ignore")}
    splitting = lambda z, x: F.relu(z - 0.05 * (z - linear(z) - x))  # noqa: E731
    # The step also scales the residual.
    forward_backward = DEQ.from_update(splitting, init="zeros", tolerance=5e-6)
    for name, way, solver in (
        ("forward-backward, a = 0.05", forward_backward, "forward"),
        ("Peaceman-Rachford, a = 1", peaceman_rachford(model.cell), "forward"),
        ("Peaceman-Rachford, accelerated", peaceman_rachford(model.cell), None),
        ("layer: the equation itself", model.layer, None),
    ):
        # The states of the other ways are at least zero already.
        logits = model.head(F.relu(way(x, solver=solver, **options)))
        F.cross_entropy(logits, labels).backward(retain_graph=True)
        rows.append(solved(name, way, accuracy=share(logits, labels)))
    return show(rows)


if __name__ == "__main__":
    tyro.cli(main)

"""What the programs of this folder share: training loops, and the table that they print."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn import DEQ
from implicit_attn.data import load_digits

Row = dict[str, Any]


def train(
    parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], steps: int, rate: float = 1e-3
) -> None:
    """Run steps of Adam; ``loss`` draws a batch and returns its loss."""
    optimizer = torch.optim.Adam(parameters, lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def train_on_digits(model: nn.Module, steps: int, batch: int, rate: float) -> tuple[Tensor, Tensor]:
    """Train a classifier of 8 x 8 digits, and return the test images (B, 1, 8, 8) and their labels."""
    data = load_digits()

    def loss() -> Tensor:
        chosen = torch.randint(len(data.train_labels), (batch,))
        return F.cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen])

    train(model.parameters(), loss, steps, rate)
    return data.test_images, data.test_labels


def begin(seed: int) -> None:
    """Use one thread and seed torch's generator."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)


def share(logits: Tensor, labels: Tensor) -> float:
    """Return the share of right answers."""
    return (logits.argmax(-1) == labels).double().mean().item()


def solved(way: str, layer: DEQ, **measures: float) -> Row:
    """Return the row of a layer's latest solve; evaluations are those of the slowest sample."""
    last = layer.last
    assert last is not None
    adjoint = last.adjoint.solution
    backward = "" if adjoint is None else int(adjoint.evaluations.max())
    status = ", ".join(f"{count} {name}" for name, count in last.counts().items())
    return row(way, int(last.evaluations.max()), backward, status, **measures)


def row(way: str, forward: int, backward: int | str, status: str, **measures: float) -> Row:
    return {
        "solved by": way,
        "forward": forward,
        "backward": backward,
        "status": status,
        **measures,
    }


def show(rows: list[Row]) -> list[Row]:
    """Print the rows as a table, numbers with four digits, and return them."""
    lines = [list(rows[0])] + [
        [f"{value:.4g}" if isinstance(value, float) else str(value) for value in each.values()]
        for each in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(
            "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        )
    return rows

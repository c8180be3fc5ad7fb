"""How well outputs fit their targets, sample by sample, so that any subset can be pooled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.data import board_counts

# Of each sample: what is summed, and the number of terms in it.
Measures = dict[str, tuple[Tensor, Tensor]]
Measure = Callable[[Tensor, Tensor, Tensor], Measures]


def measure_classes(logits: Tensor, inputs: Tensor, targets: Tensor) -> Measures:
    """Accuracy and cross-entropy of logits (B, classes) for labels ``targets`` (B,)."""
    one = torch.ones(len(targets), dtype=torch.float64, device=logits.device)
    right = (logits.argmax(1) == targets).double()
    loss = F.cross_entropy(logits.double(), targets, reduction="none")
    return {"accuracy": (right, one), "loss": (loss, one)}


def measure_boards(logits: Tensor, inputs: Tensor, targets: Tensor) -> Measures:
    """Solved boards, right cells and cross-entropy of the unknown cells of Sudoku puzzles.

    Args:
        logits: (B, 81, 9) of the digits 1 .. 9.
        inputs: (B, 81) puzzles, 0 = unknown.
        targets: (B, 81) solutions.

    Returns:
        accuracy (of whole boards), cell_accuracy and loss.
    """
    right, unknown = board_counts(logits.argmax(-1) + 1, inputs, targets)
    losses = F.cross_entropy(logits.double().transpose(1, 2), targets - 1, reduction="none")
    loss = (losses * (inputs == 0)).sum(1)
    one = torch.ones(len(targets), dtype=torch.float64, device=logits.device)
    cells = unknown.double()
    return {
        "accuracy": ((right == unknown).double(), one),
        "cell_accuracy": (right.double(), cells),
        "loss": (loss, cells),
    }


class Pool:
    """Means over the samples of several batches."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}

    def add(self, measures: Measures) -> None:
        """Count these samples in."""
        for name, (above, below) in measures.items():
            top, number = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (top + above.sum().item(), number + below.sum().item())

    def means(self) -> dict[str, float]:
        """Mean of each measure over everything that was added."""
        return {name: top / number for name, (top, number) in self.sums.items()}

"""What stands around the layers: an embedding, positions, a readout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.learns.task import Task

SPREAD = 0.5  # of the initial positions and of the class token


class TokenModel(nn.Module):
    """``logits = head(read(norm(layers(embed(inputs) + places))))``.

    Args:
        task: tells the embedding, the number of tokens and the classes.
        layers: tokens (B, N, dim) -> the same shape; N is one more with the readout "class".
        dim: width of a token.
        readout: "mean" of all tokens, or the first one: with "class" a learned vector in front, with
            "query" the task's own.

    Shapes: inputs (B, N, ...) -> logits (B, classes).
    """

    def __init__(self, task: Task, layers: nn.Module, dim: int, readout: str) -> None:
        super().__init__()
        if readout not in task.readouts:
            raise ValueError(
                f"readout must be one of {task.readouts} for this task, got {readout!r}"
            )
        self.readout = readout
        self.embed = task.embed(dim)
        self.place = nn.Parameter(SPREAD * torch.randn(task.tokens, dim)) if task.places else None
        self.front = nn.Parameter(SPREAD * torch.randn(dim)) if readout == "class" else None
        self.layers = layers
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, task.classes)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.embed(inputs)
        if self.place is not None:
            tokens = tokens + self.place
        if self.front is not None:
            tokens = torch.cat([self.front.expand(len(tokens), 1, -1), tokens], dim=1)
        states = self.norm(self.layers(tokens))
        return self.head(states.mean(1) if self.readout == "mean" else states[:, 0])

"""Sudoku as 81 tokens around any backbone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from implicit_attn.data.sudoku_boards import CELLS, PLACES, SIDE
from implicit_attn.models.patches import token_width
from solvers.core.checks import require_choice

STARTS = ("random", "units")


class SudokuModel(nn.Module):
    """The 81 cells of a Sudoku as tokens of a backbone; logits of the nine digits in every cell.

    A token is the embedding of the digit, or of "unknown", plus a learned position.

    Args:
        backbone: module with ``dim`` and ``forward(tokens (B, 81, d), *, iterations=None)``.
        scale: standard deviation of the initial embeddings and positions.
        dropout: dropout rate of the tokens in training.
        start: initial positions: "random", as published, draws each; "units" adds a random vector
            of the row, one of the column and one of the box, so that cells which constrain each
            other begin with similar positions.

    Shapes: puzzles (B, 81) of integers, 0 = unknown, rows of the board one after another ->
    logits (B, 81, 9) of the digits 1 .. 9.

    Source: the Sudoku experiments of Hu, Zou, Xu, "Hyper-SET" (https://arxiv.org/abs/2502.11646).
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        scale: float = 0.02,
        dropout: float = 0.0,
        start: str = "random",
    ) -> None:
        super().__init__()
        dim = token_width(backbone)
        if not scale > 0:
            raise ValueError(f"scale must be > 0, got {scale!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout!r}")
        require_choice("start", start, STARTS)
        self.digits = nn.Embedding(SIDE + 1, dim)
        nn.init.normal_(self.digits.weight, std=scale)
        places = torch.randn(CELLS, dim) if start == "random" else _units(dim)
        self.dropout = nn.Dropout(dropout)
        self.position = nn.Parameter(scale * places)
        self.backbone = backbone
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, SIDE, bias=False)

    def tokens(self, puzzles: Tensor) -> Tensor:
        """Puzzles (B, 81) -> the backbone's input, (B, 81, d)."""
        if puzzles.dim() != 2 or puzzles.shape[1] != CELLS or puzzles.is_floating_point():
            raise ValueError(
                f"puzzles must be integers (B, 81), got {puzzles.dtype} {tuple(puzzles.shape)}"
            )
        return self.dropout(self.digits(puzzles) + self.position)

    def classify(self, z: Tensor) -> Tensor:
        """A state (B, 81, d) -> logits (B, 81, 9)."""
        return self.head(self.norm(z))

    def forward(self, puzzles: Tensor, iterations: int | None = None) -> Tensor:
        return self.classify(self.backbone(self.tokens(puzzles), iterations=iterations))


def _units(dim: int) -> Tensor:
    """(81, dim): vectors of rows, columns and boxes summed to variance 1 per cell."""
    rows, columns, boxes = torch.tensor(PLACES).T
    vectors = torch.randn(3, SIDE, dim) / 3**0.5
    return vectors[0, rows] + vectors[1, columns] + vectors[2, boxes]

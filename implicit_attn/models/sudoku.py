"""Sudoku as 81 tokens around any backbone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from implicit_attn.data.sudoku import CELLS, PLACES, SIDE
from implicit_attn.models.images import grid_positions, token_width
from solvers.core.checks import require_choice

SCALE = 0.02  # standard deviation of the initial embeddings and positions
STARTS = ("random", "units")
POSITIONS = ("learned", "sincos")
FINAL_NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class SudokuModel(nn.Module):
    """The 81 cells of a Sudoku as tokens of a backbone; logits of the nine digits in every cell.

    A token is the embedding of the digit, or of "unknown", plus a position.

    Args:
        backbone: module with ``dim`` and ``forward(tokens (B, 81, d), *, iterations=None)``.
        dropout: dropout rate of the tokens in training.
        start: initial positions: "random", as published, draws each; "units" adds a random vector
            of the row, one of the column and one of the box, so that cells which constrain each
            other begin with similar positions.
        positions: "learned", or "sincos", the constants of ``grid_positions``.
        final_norm: before the readout, "layer" or, as in the official code, "rms".

    Shapes: puzzles (B, 81) of integers, 0 = unknown, rows of the board one after another ->
    logits (B, 81, 9) of the digits 1 .. 9.

    Source: the Sudoku experiments of Hu, Zou, Xu, "Hyper-SET" (https://arxiv.org/abs/2502.11646).
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dropout: float = 0.0,
        start: str = "random",
        positions: str = "learned",
        final_norm: str = "layer",
    ) -> None:
        super().__init__()
        dim = token_width(backbone)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout!r}")
        require_choice("start", start, STARTS)
        require_choice("final_norm", final_norm, FINAL_NORMS)
        self.digits = nn.Embedding(SIDE + 1, dim)
        nn.init.normal_(self.digits.weight, std=SCALE)
        if require_choice("positions", positions, POSITIONS) == "learned":
            places = torch.randn(CELLS, dim) if start == "random" else _units(dim)
            self.position = nn.Parameter(SCALE * places)
        elif start != "random":
            raise ValueError(f"start must be 'random' where positions are 'sincos', got {start!r}")
        else:
            self.register_buffer("position", grid_positions(SIDE, dim), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.backbone = backbone
        self.norm, self.head = FINAL_NORMS[final_norm](dim), nn.Linear(dim, SIDE, bias=False)

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

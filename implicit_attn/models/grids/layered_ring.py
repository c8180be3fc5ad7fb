"""A transformer of fixed depth for rings of any length: the rival of the equilibrium."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from implicit_attn.models.grids.cell_block import CellBlock
from implicit_attn.models.grids.ring_bias import DistanceBias, LocalBias
from solvers.core.checks import require_count


class LayeredRing(nn.Module):
    """Pre-norm layers with weights of their own, each a :class:`CellBlock` with ``x = z``.

    Args:
        features: F of a position.
        classes: C.
        dim, heads, hidden: of a layer; hidden None: 2 dim.
        layers: their number.
        reach: how far a position looks in one layer (:class:`LocalBias`); None: all positions see
            each other (:class:`DistanceBias`). Each layer has a bias of its own.

    Shapes: inputs (B, N, F) -> logits (B, N, C).

    Raises:
        TypeError, ValueError: inputs of another shape, or a count that is no integer >= 1.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        dim: int = 32,
        heads: int = 4,
        hidden: int | None = None,
        *,
        layers: int = 4,
        reach: int | None = None,
    ) -> None:
        super().__init__()
        hidden = 2 * dim if hidden is None else hidden
        number = require_count("layers", layers)
        self.features = require_count("features", features)
        self.embedding = nn.Linear(features, dim)
        self.blocks: Any = nn.ModuleList(CellBlock(dim, heads, hidden) for _ in range(number))
        self.biases: Any = nn.ModuleList(
            DistanceBias(heads) if reach is None else LocalBias(heads, reach) for _ in range(number)
        )
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, require_count("classes", classes))

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dim() != 3 or inputs.shape[2] != self.features:
            raise ValueError(f"inputs must be (B, N, {self.features}), got {tuple(inputs.shape)}")
        z = self.embedding(inputs)
        for block, bias in zip(self.blocks, self.biases, strict=True):
            z = block(z, z, bias(inputs.shape[1]))
        return self.readout(self.norm(z))

"""One local block at its fixed point, for rings of any length."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from implicit_attn.deq import DEQ
from implicit_attn.models.grids.cell_block import CellBlock
from implicit_attn.models.grids.ring_bias import LocalBias
from implicit_attn.updates.update import Update
from solvers.core.checks import require_count


class Surroundings(NamedTuple):
    """The input of a :class:`LocalUpdate`: cells (B, N, d), and the bias of pairs (B, heads, N, N)."""

    cells: Tensor
    bias: Tensor


class LocalUpdate(Update):
    """A :class:`CellBlock` as an update: the input's cells enter every evaluation; it starts at 0."""

    def __init__(self, block: CellBlock) -> None:
        super().__init__()
        self.block = block

    def initial(self, x: Surroundings) -> Tensor:
        return torch.zeros_like(x.cells)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            raise ValueError("mask must be None: a LocalUpdate has no masked cells, got one")
        return self.block(z, x.cells, x.bias)


class EquilibriumRing(nn.Module):
    r"""Classes of the positions of a ring from the fixed point ``z* = f(z*, x)`` of a local block.

    Each evaluation lets a position look ``reach`` positions to each side, and reads the input anew.
    Nothing depends on the length of the ring or the place on it. In training ``forward`` is iterated
    from zero and differentiated through all iterations, more than a small ring needs, so that what is
    found must stay. ``layer`` solves for it by any solver.

    Args:
        features: F of a position.
        classes: C.
        dim, heads, hidden: of the block; hidden None: 2 dim.
        reach: how far a position looks in one evaluation.
        iterations: of ``forward``; a call may ask for any other number.
        layer: options of the ``DEQ``.

    Shapes: inputs (B, N, F) -> logits (B, N, C).

    Raises:
        TypeError, ValueError: inputs of another shape, or a count that is no integer >= 1.

    Source: input injection and random numbers of iterations for extrapolation: Bansal et al. (2022),
    https://arxiv.org/abs/2202.05826; fixed points that do not depend on the start: Anil et al. (2022),
    https://arxiv.org/abs/2211.09961.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        dim: int = 32,
        heads: int = 4,
        hidden: int | None = None,
        *,
        reach: int = 1,
        iterations: int = 32,
        layer: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        hidden = 2 * dim if hidden is None else hidden
        self.features = require_count("features", features)
        self.iterations = require_count("iterations", iterations)
        self.embedding = nn.Linear(features, dim)
        self.bias = LocalBias(heads, reach)
        options: dict[str, Any] = {"max_steps": iterations, "on_failure": "ignore"}
        self.layer = DEQ(LocalUpdate(CellBlock(dim, heads, hidden)), **options | (layer or {}))
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, require_count("classes", classes))

    def encode(self, inputs: Tensor) -> Surroundings:
        """What every evaluation sees of the inputs (B, N, F)."""
        if inputs.dim() != 3 or inputs.shape[2] != self.features:
            raise ValueError(f"inputs must be (B, N, {self.features}), got {tuple(inputs.shape)}")
        return Surroundings(
            self.embedding(inputs), self.bias(inputs.shape[1]).expand(len(inputs), -1, -1, -1)
        )

    def decode(self, state: Tensor) -> Tensor:
        """Logits (B, N, C) of a state (B, N, d)."""
        return self.readout(self.norm(state))

    def forward(self, inputs: Tensor, *, iterations: int | None = None) -> Tensor:
        """Logits after ``iterations`` evaluations from zero."""
        count = self.iterations if iterations is None else require_count("iterations", iterations)
        x = self.encode(inputs)
        z = self.layer.update.initial(x)
        for _ in range(count):
            z = self.layer.update(z, x)
        return self.decode(z)

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}"

"""Biases of attention between the positions of a ring of any length."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from solvers.core.checks import require_count

FORBIDDEN = -1e4  # a score whose exponential is zero; infinity would be refused as a layer's input


def ring_offsets(size: int) -> Tensor:
    """(N, N) int64: how far j lies behind i (positive) or before it, the shorter way round."""
    places = torch.arange(size)
    half = (size - 1) // 2
    return (places[:, None] - places[None, :] + half) % size - half


class LocalBias(nn.Module):
    """A learned number for each head and each offset up to ``reach``; further pairs are masked.

    Shapes: ``forward(N)`` -> (heads, N, N). Every position of a ring has the same, so a model with no
    other knowledge of places is the same for rings of any length, up to a shift.

    Args:
        heads: attention heads.
        reach: how far to each side a position looks.
    """

    def __init__(self, heads: int, reach: int = 1) -> None:
        super().__init__()
        self.reach = require_count("reach", reach)
        self.table = nn.Parameter(torch.randn(require_count("heads", heads), 2 * reach + 1))

    def forward(self, size: int) -> Tensor:
        offsets = ring_offsets(size).to(self.table.device)
        near = offsets.clamp(-self.reach, self.reach)
        values = self.table[:, near + self.reach]
        return values.masked_fill(near != offsets, FORBIDDEN)


class DistanceBias(nn.Module):
    """``-exp(s) n``, n the positions back from i to j around the ring: all pairs see each other.

    A learned number for each offset in {-1, 0, 1} is added, so that neighbours can be told apart. The
    slopes ``exp(s)`` of the heads are learned from 1/2, 1/4, 1/8, ...

    Shapes: ``forward(N)`` -> (heads, N, N).

    Source: linear biases that extend to longer inputs: Press, Smith, Lewis, "Train short, test long"
    (2022), https://arxiv.org/abs/2108.12409.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        steps = torch.arange(1, require_count("heads", heads) + 1)
        self.slopes = nn.Parameter(-steps * torch.log(torch.tensor(2.0)))
        self.table = nn.Parameter(torch.randn(heads, 3))

    def forward(self, size: int) -> Tensor:
        places = torch.arange(size, device=self.table.device)
        back = (places[:, None] - places[None, :]) % size
        offsets = ring_offsets(size).to(self.table.device)
        near = self.table[:, offsets.clamp(-1, 1) + 1] * (offsets.abs() <= 1)
        return near - self.slopes.exp()[:, None, None] * back

"""Low-rank differences of a shared weight from iteration to iteration."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from solvers.core.checks import require_count, require_positive


class LowRankDeltas(nn.Module):
    """``W_t = W + scale A_t B_t``, ``A_t`` (rows, rank) and ``B_t`` (rank, dim), for each iteration t.

    All entries are drawn from N(0, deviation^2), so the iterations differ from the start. Iterations
    beyond the last delta use the last.

    Args:
        rows, dim: shape of the weight W.
        rank: of the differences.
        iterations: number of differences.
        scale: their factor.
        deviation: standard deviation of the initial entries.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, depth-wise LoRA.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        rank: int,
        iterations: int,
        *,
        scale: float = 4.0,
        deviation: float = 0.02,
    ) -> None:
        super().__init__()
        sizes = {"rows": rows, "dim": dim, "rank": rank, "iterations": iterations}
        for name, size in sizes.items():
            require_count(name, size)
        if isinstance(scale, bool) or not math.isfinite(scale):
            raise ValueError(f"scale must be a finite number, got {scale!r}")
        deviation = require_positive("deviation", deviation)
        self.scale = float(scale)
        self.left = nn.Parameter(deviation * torch.randn(iterations, rows, rank))
        self.right = nn.Parameter(deviation * torch.randn(iterations, rank, dim))

    def forward(self, weight: Tensor, index: int) -> Tensor:
        """``W_t`` for the weight W (rows, dim) and t = ``index``, counted from 0."""
        index = min(index, len(self.left) - 1)
        return torch.addmm(weight, self.left[index], self.right[index], alpha=self.scale)

    def extra_repr(self) -> str:
        iterations, rows, rank = self.left.shape
        dim = self.right.shape[-1]
        return f"rows={rows}, dim={dim}, rank={rank}, iterations={iterations}, scale={self.scale}"

"""The block of the models of cells: attention with a bias of pairs, then a feed-forward part."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from solvers.core.checks import require_count


class CellBlock(nn.Module):
    r"""``h = x + A(LN(z))``, ``h + W_2 relu(W_1 LN(h))``: what cells take from others is added to x.

    A is attention with scores ``q_i . k_j / sqrt(d / heads) + b_ij``. With ``x = z`` it is a pre-norm
    layer of a transformer; with another x, the input of a fixed point. All parts but x are bounded, so
    the map z -> f(z, x) has a fixed point whatever the weights.

    Args:
        dim: features d of a cell.
        heads: attention heads, a divisor of d.
        hidden: hidden units of the feed-forward part.

    Shapes: z, x (B, N, d), bias (heads, N, N) or (B, heads, N, N) -> (B, N, d).

    Raises:
        ValueError: heads that do not divide d.
    """

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = require_count("heads", heads)
        if require_count("dim", dim) % heads:
            raise ValueError(f"heads must divide dim={dim}, got {heads}")
        self.queries_keys_values = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.widen = nn.Linear(dim, require_count("hidden", hidden))
        self.narrow = nn.Linear(hidden, dim)
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, z: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        h = x + self.attend(self.attention_norm(z), bias)
        return h + self.narrow(F.relu(self.widen(self.feedforward_norm(h))))

    def attend(self, z: Tensor, bias: Tensor) -> Tensor:
        """A of cells (B, N, d)."""
        made = self.queries_keys_values(z).unflatten(2, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = made.chunk(3, dim=1)  # (B, heads, N, d / heads) each
        # Written out: with a bias that learns, the fused kernel is not to be had on the CPU.
        weights = ((query * query.shape[3] ** -0.5) @ key.mT + bias).softmax(dim=3)
        return self.output((weights @ value).transpose(1, 2).flatten(2))

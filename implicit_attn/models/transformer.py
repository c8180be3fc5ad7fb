"""A pre-norm transformer with repeated layers: the baseline."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.models.recurrent import HeadsLayer, RecurrentBackbone, keep_masked
from solvers.core.checks import require_count


class TransformerLayer(HeadsLayer):
    """``X + MHSA(LN(X))``, then ``X + W_2 relu(W_1 LN(X))``; only the LayerNorms have biases."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__(dim, heads)
        self.queries_keys_values = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.widen = nn.Linear(dim, require_count("hidden", hidden), bias=False)
        self.narrow = nn.Linear(hidden, dim, bias=False)

    def advance(self, z: Tensor, context: Any, index: int, mask: Tensor | None = None) -> Tensor:
        split = self.split(self.queries_keys_values(self.attention_norm(z)))
        query, key, value = split.chunk(3, dim=1)
        moved = z + self.output(self.attend(query, key, value, mask))
        moved = moved + self.narrow(F.relu(self.widen(self.feedforward_norm(moved))))
        return keep_masked(moved, z, mask)


class SharedTransformer(RecurrentBackbone):
    """A pre-norm transformer whose layer is repeated: a Universal Transformer without halting.

    Args:
        dim: features d.
        heads: attention heads, a divisor of d.
        hidden: hidden units of the feed-forward part; None: 4 d.
        layers: their number.
        recurrence: iterations, order and beyond of ``RecurrentBackbone``.

    Shapes: tokens (B, N, d) -> (B, N, d).

    Source: Dehghani et al., "Universal Transformers" (https://arxiv.org/abs/1807.03819); the baseline
    of Hu, Zou, Xu, "Hyper-SET" (https://arxiv.org/abs/2502.11646).
    """

    def __init__(
        self, dim: int, heads: int, hidden: int | None = None, *, layers: int = 1, **recurrence: Any
    ) -> None:
        hidden, number = 4 * dim if hidden is None else hidden, require_count("layers", layers)
        made = [TransformerLayer(dim, heads, hidden) for _ in range(number)]
        super().__init__(dim, made, **recurrence)

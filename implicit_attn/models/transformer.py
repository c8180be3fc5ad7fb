"""Pre-norm transformers with repeated layers: the baseline, and one of masked tokens."""

from __future__ import annotations

from typing import Any

import torch
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
        self,
        dim: int,
        heads: int,
        hidden: int | None = None,
        *,
        layers: int = 1,
        **recurrence: Any,
    ) -> None:
        hidden, number = 4 * dim if hidden is None else hidden, require_count("layers", layers)
        made = [TransformerLayer(dim, heads, hidden) for _ in range(number)]
        super().__init__(dim, made, **recurrence)


class MaskedTransformer(nn.Module):
    """Tokens of N positions and d colours, some of them masked -> logits of their colours.

    Each token starts as the embedding of its colour (or of the mask) plus that of its position. Then
    come ``layers`` pre-norm layers (attention, feed-forward with ReLU), each applied ``iterations`` times,
    a LayerNorm and an affine readout. ``iterations=1`` is a vanilla transformer; more recycle its layers.
    A model that was trained with one number of iterations in general needs that number when it is
    used; training with random numbers (``Recipe(iterations=(least, most))``) makes it depend less on it.

    Args:
        sites: N.
        colours: d; the number d itself stands for a masked token.
        dim: features of a token.
        heads: attention heads, a divisor of ``dim``.
        hidden: hidden units of the feed-forward part; None: ``2 dim``.
        layers: their number.
        iterations: T of each layer; a call may ask for any other number.

    Shapes: tokens (B, N), integers in [0, d] -> (B, N, d).

    Source: the masked-token models of Rende, Gerace, Laio, Goldt (2024),
    https://arxiv.org/abs/2304.07235; recycling as in Dehghani et al., "Universal Transformers"
    (2019), https://arxiv.org/abs/1807.03819.
    """

    def __init__(
        self,
        sites: int,
        colours: int,
        dim: int = 48,
        heads: int = 4,
        hidden: int | None = None,
        *,
        layers: int = 1,
        iterations: int = 1,
    ) -> None:
        super().__init__()
        self.sites = require_count("sites", sites)
        self.colours = require_count("colours", colours, low=2)
        self.embedding = nn.Embedding(colours + 1, require_count("dim", dim))
        self.positions = nn.Parameter(torch.empty(sites, dim))
        hidden = 2 * dim if hidden is None else hidden
        self.backbone = SharedTransformer(dim, heads, hidden, layers=layers, iterations=iterations)
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, colours)
        nn.init.normal_(self.positions)

    def forward(self, tokens: Tensor, *, iterations: int | None = None) -> Tensor:
        """Logits (B, N, d) of all positions after ``iterations`` of each layer; None: as made."""
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise TypeError(f"tokens must be integers, got {tokens.dtype}")
        if tokens.dim() != 2 or tokens.shape[1] != self.sites:
            raise ValueError(f"tokens must be (B, {self.sites}), got {tuple(tokens.shape)}")
        if len(tokens) > 0:
            low, high = (int(value) for value in tokens.aminmax())
            if low < 0 or high > self.colours:
                raise ValueError(f"tokens must be in [0, {self.colours}], got {low} .. {high}")
        x = self.embedding(tokens) + self.positions
        return self.readout(self.norm(self.backbone(x, iterations=iterations)))

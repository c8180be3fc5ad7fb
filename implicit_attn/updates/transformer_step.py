"""A pre-norm transformer block as an update, with the input added to the state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.energy import AttentionContext, is_prepared
from implicit_attn.energies.heads import (
    AttentionInput,
    check_state,
    fit_pairs,
    head_width,
    read_input,
)
from implicit_attn.energies.tokens import Mask, check_tokens, hide
from implicit_attn.kernels.arguments import attention_for_transforms
from implicit_attn.updates.update import Update
from solvers.core.checks import require_choice, require_count, require_flag

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}


class TransformerStep(Update):
    r"""A pre-norm transformer block with the input added to the normalised state::

        n = LN(z + x)                                  (without weights)
        h = n + W_o softmax(q k^T / sqrt(p)) v         q, k, v = W LN(n)
        f(z, x) = h + W_2 act(W_1 LN(h) + b_1) + b_2

    Keys and values are computed from the state, or with ``cross`` from a memory. The norm bounds the residual
    stream for any weights, so the continuous map f has a fixed point. It need not be unique or attractive;
    training makes the iteration converge (:class:`implicit_attn.DEQTransformer`). Weights and cost of one
    evaluation are those of ``nn.TransformerEncoderLayer(norm_first=True)`` without biases of attention.

    Args:
        dim: features d.
        heads: number of heads H, a divisor of d, each of width p = d / H.
        hidden: number of hidden units; None for ``4 dim``.
        activation: activation of the hidden units, "gelu" or "relu".
        causal: whether token i attends only to, and f at i depends only on, tokens ``j <= i``.
        cross: whether keys and values come from a memory.
        memory_dim: features of the memory with ``cross``; None for d.

    Shapes: ``z`` (B, N, d). ``x`` (B, N, d), or an ``AttentionInput`` with such ``tokens`` and optional
    pairs and biases, and with ``cross`` a memory (B, M, memory_dim) with its mask. ``mask`` (B, N) bool,
    False at masked tokens, to which no other attends. The attention of a query without any key is zero.

    Source: Xiong et al. (2020), https://arxiv.org/abs/2002.04745, for the block; Bai, Kolter, Koltun (2019),
    https://arxiv.org/abs/1909.01377, for a fixed point with norms in other positions.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int | None = None,
        *,
        activation: str = "gelu",
        causal: bool = False,
        cross: bool = False,
        memory_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.width = head_width(dim, heads, None)
        self.dim, self.heads, self.causal = dim, heads, require_flag("causal", causal)
        if require_flag("cross", cross) and causal:
            raise ValueError("causal=True needs self-attention, got cross=True")
        if memory_dim is not None and not cross:
            raise ValueError(f"memory_dim needs cross=True, got {memory_dim!r}")
        self.cross = cross
        self.source = dim if memory_dim is None else require_count("memory_dim", memory_dim)
        self.hidden = 4 * dim if hidden is None else require_count("hidden", hidden)
        self.activation = require_choice("activation", activation, ACTIVATIONS)
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(self.source, 2 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.widen, self.narrow = nn.Linear(dim, self.hidden), nn.Linear(self.hidden, dim)

    def initial(self, x: Any) -> Any:
        """Return the tokens of the input."""
        return x.tokens if isinstance(x, AttentionInput) else x

    def prepare(self, x: Any, *, mask: Mask = None) -> AttentionContext:
        """Return the input, the allowed pairs, and with ``cross`` keys and values."""
        if is_prepared(x, mask):
            return x
        name, tokens = type(self).__name__, self.initial(x)
        check_tokens(tokens, mask, f"{name}, x", dim=self.dim, tokens=True)
        _, given, memory, seen = read_input(x, mask, name, self.source if self.cross else None)
        key = value = None
        if self.cross:
            key, value = self._split(self.key_value(memory), 2)
            check_state(tokens, AttentionContext(key=key), name, self.dim, True)
        batch, count, keys = tokens.shape[0], tokens.shape[1], memory.shape[1]
        pairs = fit_pairs(given, (batch, self.heads, count, keys), tokens.device)
        pairs = pairs.intersect(None if seen is None else seen[:, None, None, :])
        if self.causal and any(part is not None for part in pairs):
            order = torch.ones(keys, keys, dtype=torch.bool, device=tokens.device).tril()
            pairs = pairs.intersect(order.expand(batch, 1, -1, -1))
        keyless = None
        if pairs.allowed is not None:
            keyless = ~pairs.allowed.any(-1)
            # A softmax over no keys would be NaN.
            pairs = pairs._replace(allowed=pairs.allowed | keyless.unsqueeze(-1))
        return AttentionContext(
            tokens=hide(tokens, mask), key=key, value=value, pairs=pairs, keyless=keyless, mask=mask
        )

    def forward(self, z: Tensor, x: Any = None, *, mask: Mask = None) -> Tensor:
        context = self.prepare(x, mask=mask)
        check_tokens(z, context.mask, type(self).__name__, dim=self.dim, tokens=True)
        assert context.tokens is not None
        n = F.layer_norm(hide(z, context.mask) + context.tokens, (self.dim,))
        h = n + self._attend(self.attention_norm(n), context)
        hidden = ACTIVATIONS[self.activation](self.widen(self.feedforward_norm(h)))
        return h + self.narrow(hidden)

    def _attend(self, n: Tensor, context: AttentionContext) -> Tensor:
        (query,) = self._split(self.query(n), 1)
        key, value = context.key, context.value
        if key is None or value is None:
            key, value = self._split(self.key_value(n), 2)
        (allowed, bias), keyless = context.pairs, context.keyless
        pattern = allowed
        if bias is not None:
            pattern = bias.to(query.dtype)
            pattern = pattern if allowed is None else pattern.masked_fill(~allowed, -torch.inf)
        with attention_for_transforms(query, key, value):
            found = F.scaled_dot_product_attention(
                query, key, value, attn_mask=pattern, is_causal=self.causal and allowed is None
            )
        if keyless is not None:
            found = found.masked_fill(keyless.unsqueeze(-1), 0.0)
        return self.output(found.transpose(1, 2).flatten(2))

    def _split(self, features: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Split (B, N, parts d) into ``parts`` tensors (B, H, N, p)."""
        return features.unflatten(-1, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def extra_repr(self) -> str:
        return f"heads={self.heads}, causal={self.causal}, cross={self.cross}"

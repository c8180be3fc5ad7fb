"""A causal language model whose sublayers are steps of descent."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from implicit_attn.models.attention.forms import build_attention_form
from implicit_attn.models.language.sublayers import (
    SCALE,
    AttentionBranch,
    FeedForwardBranch,
    check_dropout,
    draw_weights,
    output_layers,
)
from implicit_attn.updates.momentum import DescentStep
from solvers.core.checks import require_count


class SymbolModel(nn.Module):
    """What the language models share: symbols to tokens, and states to logits of the next symbol.

    A token is the embedding of a symbol plus a learned position; the logits are a linear map of the
    LayerNorm of the last state, with weights of its own.

    Args:
        vocabulary: number of symbols V.
        dim: features d of a token.
        length: the most symbols that the model sees at once, n.
        dropout: share of values that are set to 0 in training.

    Shapes: symbols (B, N), integers in 0 .. V - 1, N <= n -> logits (B, N, V); those at place i are of
    symbol i + 1 and depend on symbols 0 .. i alone.
    """

    def __init__(self, vocabulary: int, dim: int, length: int, dropout: float) -> None:
        super().__init__()
        self.vocabulary = require_count("vocabulary", vocabulary)
        self.dim, self.length = require_count("dim", dim), require_count("length", length)
        self.embedding = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(SCALE * torch.randn(length, dim))
        self.dropout = nn.Dropout(check_dropout(dropout))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, symbols: Tensor, iterations: int | None = None) -> Tensor:
        """Logits of each next symbol; ``iterations`` None: as many as in training."""
        count = None if iterations is None else require_count("iterations", iterations)
        return self.head(self.norm(self.mix(self.tokens(symbols), count)))

    def tokens(self, symbols: Tensor) -> Tensor:
        """The tokens of symbols, (B, N, d)."""
        if symbols.dim() != 2 or symbols.is_floating_point() or symbols.dtype == torch.bool:
            raise ValueError(
                f"symbols must be integers (B, N), got {symbols.dtype} {tuple(symbols.shape)}"
            )
        if not 1 <= symbols.shape[1] <= self.length:
            raise ValueError(
                f"symbols must be 1 to {self.length} in a row, got {symbols.shape[1]} of them"
            )
        # On a card the look would wait for it, and torch has its own assertion there.
        if symbols.device.type == "cpu" and symbols.numel() and not torch.compiler.is_compiling():
            low, high = symbols.aminmax()
            if low < 0 or high >= self.vocabulary:
                raise ValueError(
                    f"symbols must lie in [0, {self.vocabulary - 1}], got {int(low)} to {int(high)}"
                )
        return self.dropout(self.embedding(symbols.long()) + self.position[: symbols.shape[1]])

    @abstractmethod
    def mix(self, tokens: Tensor, iterations: int | None) -> Tensor:
        """The last states of tokens, (B, N, d) -> (B, N, d)."""


class LanguageModel(SymbolModel):
    """A decoder of pre-norm blocks, attention then feed-forward, each sublayer a ``DescentStep``.

    ``z <- z + u(z)`` in turn for ``u = attention(LN(z))`` and ``u = W_b gelu(W_a LN(z))``; with momentum
    a second stream runs through all of them.

    Args:
        vocabulary, dim, length, dropout: as for ``SymbolModel``.
        heads: attention heads, a divisor of d.
        layers: number of blocks.
        attention: the form of attention, a key of ``ATTENTION_FORMS``.
        descent: the step of every sublayer: "plain", "gain", "momentum" or "nesterov".
        lookahead: of "nesterov", see ``DescentStep``.
        hidden: hidden units of the feed-forward part; None: 4 d.
        iterations: passes through all blocks with the same weights; more than one make a looped
            transformer.
        form: further arguments of the attention form.

    Shapes: symbols (B, N) -> logits (B, N, V), causal.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907; for what it leaves open the customs of GPT-2, but embedding and
    head untied, as its sizes require.
    """

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        heads: int,
        layers: int,
        length: int,
        *,
        attention: str = "softmax",
        descent: str = "plain",
        lookahead: str = "literal",
        dropout: float = 0.1,
        hidden: int | None = None,
        iterations: int = 1,
        form: dict[str, object] | None = None,
    ) -> None:
        super().__init__(vocabulary, dim, length, dropout)
        number, hidden = require_count("layers", layers), 4 * dim if hidden is None else hidden
        self.iterations = require_count("iterations", iterations)
        steps: list[nn.Module] = []
        for _ in range(number):
            made = build_attention_form(attention, dim, heads, **(form or {}))
            for branch in (
                AttentionBranch(dim, made, dropout),
                FeedForwardBranch(dim, hidden, dropout),
            ):
                steps.append(DescentStep(branch, descent, lookahead=lookahead))
        self.steps: nn.ModuleList = nn.ModuleList(steps)
        draw_weights(self, output_layers(self), len(steps))

    def mix(self, tokens: Tensor, iterations: int | None) -> Tensor:
        z, p = tokens, None
        for _ in range(self.iterations if iterations is None else iterations):
            for step in self.steps:
                z, p = step(z, p)
        return z

    def extra_repr(self) -> str:
        return f"length={self.length}, iterations={self.iterations}"

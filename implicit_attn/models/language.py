"""Causal language models, unrolled or as one block at its fixed point, and text generation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.block import BlockCache, DEQTransformer, EquilibriumBlock, Iterations
from implicit_attn.data.text import decode, encode
from implicit_attn.models.attention import AttentionForm, build_attention_form
from implicit_attn.updates.update import DescentStep
from solvers.core.argument_names import hint_names
from solvers.core.checks import (
    require_choice,
    require_count,
    require_integers,
    require_nonnegative,
    require_number,
)

SCALE = 0.02  # standard deviation of initial weights, as in GPT-2
INITIAL = ("gpt2", "torch")
Caches = tuple[BlockCache, ...]  # one per block


class AttentionBranch(nn.Module):
    """``u(z) = dropout(attention(LN(z)))``, with keys and values from ``LN(memory)`` if given."""

    def __init__(self, dim: int, attention: AttentionForm, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), attention
        self.dropout = nn.Dropout(dropout)

    def forward(self, z: Tensor, *, memory: Tensor | None = None) -> Tensor:
        held = None if memory is None else self.norm(memory)
        return self.dropout(self.attention(self.norm(z), held))


class FeedForwardBranch(nn.Module):
    """``u(z) = dropout(W_b gelu(W_a LN(z) + b_a) + b_b)`` of each token."""

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, require_count("hidden", hidden))
        self.narrow = nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, z: Tensor, *, memory: Tensor | None = None) -> Tensor:
        return self.dropout(self.narrow(F.gelu(self.widen(self.norm(z)))))


def draw_weights(model: nn.Module, branches: Sequence[nn.Module]) -> None:
    """Draw weights from N(0, 0.02^2), with zero biases and branch outputs divided by ``sqrt(K)``.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2, 2019).
    """
    for part in model.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=SCALE)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
    for branch in branches:
        last: Any = (
            branch.attention.output if isinstance(branch, AttentionBranch) else branch.narrow
        )
        nn.init.normal_(last.weight, std=SCALE * len(branches) ** -0.5)


class SymbolModel(nn.Module):
    """Base class of language models, which embeds symbols and computes logits of the next symbol.

    A token is the embedding of a symbol plus a learned position. The logits are a linear map of the
    LayerNorm of the last state, with untied weights.

    Args:
        vocabulary, dim, length: numbers of symbols V and of features d of a token, context length n.
        dropout: dropout probability in training.

    Shapes: symbols (B, N), integers in 0 .. V - 1, N <= n -> logits (B, N, V); those at position i
    predict symbol i + 1 and depend only on symbols 0 .. i.

    Attributes:
        alphabet: the characters in order, for a loaded model of characters; else None.
    """

    alphabet: str | None = None

    def __init__(self, vocabulary: int, dim: int, length: int, dropout: float) -> None:
        super().__init__()
        self.vocabulary = require_count("vocabulary", vocabulary)
        self.dim, self.length = require_count("dim", dim), require_count("length", length)
        self.embedding = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(SCALE * torch.randn(length, dim))
        self.dropout = nn.Dropout(require_number("dropout", dropout, low=0.0, high=1.0))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, symbols: Tensor, **options: Any) -> Tensor:
        """Return logits of each next symbol; ``options`` are those of ``mix``."""
        return self.head(self.norm(self.mix(self.tokens(symbols), **options)))

    def tokens(self, symbols: Tensor, before: int = 0) -> Tensor:
        """Return the tokens (B, N, d) of symbols at positions from ``before`` on."""
        require_integers("symbols", symbols, (None,), high=self.vocabulary - 1)
        last = before + symbols.shape[1]
        if not before < last <= self.length:
            raise ValueError(f"symbols must have a length of 1 to {self.length}, got {last}")
        return self.dropout(self.embedding(symbols.long()) + self.position[before:last])

    @hint_names
    def generate(self, prompt: str, count: int, **options: Any) -> str:
        """Continue ``prompt`` by ``count`` characters; options are those of :func:`generate`.

        Raises:
            ValueError: if the model has no ``alphabet``, or the prompt is empty or uses other characters.
        """
        if self.alphabet is None:
            raise ValueError(
                "alphabet must be set to generate text, got None: set model.alphabet, or call "
                "implicit_attn.models.generate with symbol indices"
            )
        if not prompt:
            raise ValueError("prompt must contain at least one character, got none")
        ids = encode(prompt, self.alphabet)[None].to(self.position.device)
        return decode(generate(self, ids, count, **options)[0], self.alphabet)

    @abstractmethod
    def mix(self, tokens: Tensor) -> Tensor:
        """Return the last states of tokens, (B, N, d) -> (B, N, d)."""


class LanguageModel(SymbolModel):
    """A decoder of pre-norm blocks, attention then feed-forward, with a ``DescentStep`` per sublayer.

    Sublayers alternate between ``u = attention(LN(z))`` and ``u = W_b gelu(W_a LN(z))`` in ``z <- z + u(z)``;
    with momentum a second stream passes through all of them.

    Args:
        vocabulary, dim, length, dropout: see ``SymbolModel``.
        heads: number of attention heads, a divisor of d.
        layers: number of blocks.
        attention: form of attention, a key of ``ATTENTION_FORMS``.
        descent: step of every sublayer: "plain", "gain", "momentum" or "nesterov".
        lookahead: lookahead of "nesterov", see ``DescentStep``.
        hidden: number of hidden units of the feed-forward part; None for 4 d.
        initial: "gpt2" for weights from N(0, 0.02^2), or "torch" for embeddings from N(0, 1/d) and torch's
            default layers, which trains faster at small widths.
        form: further arguments of the attention form.

    Shapes: symbols (B, N) -> logits (B, N, V), causal.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907; unspecified details follow GPT-2, except that embedding and head
    are untied, as its sizes require.
    """

    @hint_names
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
        initial: str = "gpt2",
        form: dict[str, object] | None = None,
    ) -> None:
        super().__init__(vocabulary, dim, length, dropout)
        hidden = 4 * dim if hidden is None else hidden
        branches: list[nn.Module] = []
        for _ in range(require_count("layers", layers)):
            made = build_attention_form(attention, dim, heads, **(form or {}))
            branches.append(AttentionBranch(dim, made, dropout))
            branches.append(FeedForwardBranch(dim, hidden, dropout))
        steps = [DescentStep(branch, descent, lookahead=lookahead) for branch in branches]
        self.steps = nn.ModuleList(steps)
        if require_choice("initial", initial, INITIAL) == "gpt2":
            draw_weights(self, branches)
        else:
            nn.init.normal_(self.embedding.weight, std=dim**-0.5)

    def mix(self, tokens: Tensor) -> Tensor:
        z, p = tokens, None
        for step in self.steps:
            z, p = step(z, p)
        return z


class EquilibriumLanguageModel(SymbolModel):
    r"""A language model with one :class:`implicit_attn.DEQTransformer`, a shared block at its fixed point.

    It has the parameters of a ``LanguageModel`` with one layer. With integer ``iterations`` the logits do not
    depend on later symbols, bit by bit.

    Args:
        vocabulary, dim, length: see ``SymbolModel``.
        heads: number of attention heads.
        hidden: number of hidden units of the feed-forward part; None for 4 d.
        iterations, gradient, layer: options of the ``DEQTransformer``. Training with random numbers of
            iterations makes the final state a fixed point.
        dropout: dropout probability of tokens in training.

    Attributes:
        last: status, residual and evaluations of each sample in the latest call, a ``solvers.Solution``
            without its value, with ``gradient="implicit"`` or ``iterations="converged"``; else None.

    Shapes: symbols (B, N) -> logits (B, N, V), causal.
    """

    @hint_names
    def __init__(
        self,
        vocabulary: int,
        dim: int,
        heads: int,
        length: int,
        *,
        hidden: int | None = None,
        iterations: Iterations = (4, 20),
        gradient: int | str = "all",
        dropout: float = 0.1,
        layer: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(vocabulary, dim, length, dropout)
        self.block = DEQTransformer(
            dim, heads, hidden, causal=True, iterations=iterations, gradient=gradient, layer=layer
        )
        # Tokens are normalised, so the relative size of embeddings and block sets their learning rates.
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)

    @property
    def last(self) -> Any:
        return self.block.last

    def mix(self, tokens: Tensor, iterations: Iterations | None = None) -> Tensor:
        return self.block(tokens, iterations=iterations) if len(tokens) else tokens


class BlockLanguageModel(SymbolModel):
    """A language model of causal ``EquilibriumBlock`` layers, which generates with a cache.

    Keys and values of a block depend only on its input, so those of earlier symbols stay as they are, and
    :func:`generate` solves for the new symbol only.

    Args:
        vocabulary, dim, length: see ``SymbolModel``.
        heads: number of attention heads.
        layers: number of blocks.
        dropout: dropout probability of tokens in training.
        options: options of the blocks.

    Shapes: symbols (B, N) -> logits (B, N, V), causal.
    """

    @hint_names
    def __init__(
        self,
        vocabulary: int,
        dim: int,
        heads: int,
        layers: int,
        length: int,
        *,
        dropout: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(vocabulary, dim, length, dropout)
        self.blocks = nn.ModuleList(
            EquilibriumBlock(dim, heads, causal=True, **options)
            for _ in range(require_count("layers", layers))
        )
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)

    def mix(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return tokens

    def step(self, symbols: Tensor, cache: Caches = ()) -> tuple[Tensor, Caches]:
        """Return the logits (B, n, V) of symbols (B, n) that follow those in the cache, and the new cache.

        See :meth:`implicit_attn.EquilibriumBlock.step`; the cache of an empty sequence is ``()``.
        """
        before = cache[0].key.shape[2] if cache else 0
        tokens, caches = self.tokens(symbols, before), []
        for block, held in zip(self.blocks, cache or [None] * len(self.blocks), strict=True):
            tokens, held = block.step(tokens, held)  # type: ignore[operator]
            caches.append(held)
        return self.head(self.norm(tokens)), tuple(caches)


@torch.no_grad()
@hint_names
def generate(
    model: nn.Module,
    prompt: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    most: int | None = None,
    generator: torch.Generator | None = None,
    iterations: int | None = None,
) -> Tensor:
    """Continue each row of ``prompt`` by ``count`` symbols with ``P(c) = softmax(logits / temperature)``.

    The model receives the last ``model.length`` symbols; one with a method ``step`` receives each symbol once
    until they are that many. It is used in evaluation mode, and its mode is restored afterwards.

    Args:
        model: module with ``length`` and ``forward(symbols (B, N)) -> logits (B, N, V)``, and optionally
            ``step(symbols, cache) -> (logits, cache)``, see :meth:`BlockLanguageModel.step`.
        prompt: (B, N) integers, N >= 1.
        count: number of symbols to add.
        temperature: temperature >= 0; 0 selects the most probable symbol.
        most: number of most probable symbols to draw from (top-k); None for all.
        generator: CPU random generator; None for torch's default.
        iterations: iterations of a model that supports them.

    Returns:
        (B, N + count), including the prompt.
    """
    require_count("count", count, low=0)
    require_nonnegative("temperature", temperature)
    if most is not None:
        require_count("most", most)
    if prompt.dim() != 2 or prompt.is_floating_point() or not prompt.shape[1]:
        raise ValueError(
            f"prompt must be integers (B, N), N >= 1, got {prompt.dtype} {tuple(prompt.shape)}"
        )
    modes = [(part, part.training) for part in model.modules()]
    symbols, length = prompt, int(model.length)  # type: ignore[arg-type]
    options = {} if iterations is None else {"iterations": iterations}
    model.eval()
    step, cache, known = getattr(model, "step", None), (), 0  # known: symbols in the cache
    try:
        for _ in range(count):
            if step is not None and symbols.shape[1] <= length:
                logits, cache = step(symbols[:, known:], cache, **options)
                known = symbols.shape[1]
            else:
                logits = model(symbols[:, -length:], **options)
            drawn = _draw(logits[:, -1].float().cpu(), temperature, most, generator)
            symbols = torch.cat((symbols, drawn.to(symbols)), 1)
    finally:
        for part, training in modes:
            part.training = training
    return symbols


def _draw(
    logits: Tensor, temperature: float, most: int | None, generator: torch.Generator | None
) -> Tensor:
    """Draw one symbol (B, 1) for each row of ``logits`` (B, V)."""
    if temperature == 0.0:
        return logits.argmax(-1, keepdim=True)
    if most is not None and most < logits.shape[1]:
        kept = logits.topk(most, -1).indices
        logits = torch.full_like(logits, -torch.inf).scatter(1, kept, logits.gather(1, kept))
    # Shifting the maximum to 0 avoids overflow at small temperatures.
    apart = (logits - logits.amax(-1, keepdim=True)).double() / temperature
    return torch.multinomial(apart.softmax(-1), 1, generator=generator)

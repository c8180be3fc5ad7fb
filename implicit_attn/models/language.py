"""Causal language models: unrolled, as one block at its fixed point, and text from them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.block import DEQTransformer, Iterations
from implicit_attn.data.text import decode, encode
from implicit_attn.hints import hint_names
from implicit_attn.models.attention import AttentionForm, build_attention_form
from implicit_attn.updates.update import DescentStep
from solvers.core.checks import (
    require_choice,
    require_count,
    require_integers,
    require_nonnegative,
    require_number,
)

SCALE = 0.02  # standard deviation of weights at the start, as in GPT-2
INITIAL = ("gpt2", "torch")


class AttentionBranch(nn.Module):
    """``u(z) = dropout(attention(LN(z)))``; keys and values of ``LN(memory)`` where that is given."""

    def __init__(self, dim: int, attention: AttentionForm, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), attention
        self.dropout = nn.Dropout(dropout)

    def forward(self, z: Tensor, *, memory: Tensor | None = None) -> Tensor:
        held = None if memory is None else self.norm(memory)
        return self.dropout(self.attention(self.norm(z), held))


class FeedForwardBranch(nn.Module):
    """``u(z) = dropout(W_b gelu(W_a LN(z) + b_a) + b_b)``, each token by itself."""

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, require_count("hidden", hidden))
        self.narrow = nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, z: Tensor, *, memory: Tensor | None = None) -> Tensor:
        return self.dropout(self.narrow(F.gelu(self.widen(self.norm(z)))))


def draw_weights(model: nn.Module, branches: Sequence[nn.Module]) -> None:
    """Weights from N(0, 0.02^2), biases 0, the last of K branches divided by ``sqrt(K)``.

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

    Attributes:
        alphabet: the symbols in their order, of a model of characters that was loaded; else None.
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

    def forward(self, symbols: Tensor, iterations: int | None = None) -> Tensor:
        """Logits of each next symbol; ``iterations`` None: as many as in training."""
        return self.head(self.norm(self.mix(self.tokens(symbols), iterations)))

    def tokens(self, symbols: Tensor) -> Tensor:
        """The tokens of symbols, (B, N, d)."""
        require_integers("symbols", symbols, (None,), high=self.vocabulary - 1)
        if not 1 <= symbols.shape[1] <= self.length:
            raise ValueError(
                f"symbols must have a length of 1 to {self.length}, got {symbols.shape[1]}"
            )
        return self.dropout(self.embedding(symbols.long()) + self.position[: symbols.shape[1]])

    @hint_names
    def generate(self, prompt: str, count: int, **options: Any) -> str:
        """``prompt`` continued by ``count`` characters; options as of :func:`generate`.

        Raises:
            ValueError: the model has no ``alphabet``, or the prompt is empty or not written in it.
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
        initial: how weights are drawn: "gpt2", all from N(0, 0.02^2), or "torch", embeddings from
            N(0, 1/d) and layers as torch draws them, which trains faster at small widths.
        form: further arguments of the attention form.

    Shapes: symbols (B, N) -> logits (B, N, V), causal.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907; for what it leaves open the customs of GPT-2, but embedding and
    head untied, as its sizes require.
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
        iterations: int = 1,
        initial: str = "gpt2",
        form: dict[str, object] | None = None,
    ) -> None:
        super().__init__(vocabulary, dim, length, dropout)
        number, hidden = require_count("layers", layers), 4 * dim if hidden is None else hidden
        self.iterations = require_count("iterations", iterations)
        branches: list[nn.Module] = []
        for _ in range(number):
            made = build_attention_form(attention, dim, heads, **(form or {}))
            branches.append(AttentionBranch(dim, made, dropout))
            branches.append(FeedForwardBranch(dim, hidden, dropout))
        steps = [DescentStep(branch, descent, lookahead=lookahead) for branch in branches]
        self.steps: nn.ModuleList = nn.ModuleList(steps)
        if require_choice("initial", initial, INITIAL) == "gpt2":
            draw_weights(self, branches)
        else:
            nn.init.normal_(self.embedding.weight, std=dim**-0.5)

    def mix(self, tokens: Tensor, iterations: int | None) -> Tensor:
        z, p = tokens, None
        count = self.iterations if iterations is None else iterations
        for _ in range(require_count("iterations", count)):
            for step in self.steps:
                z, p = step(z, p)
        return z

    def extra_repr(self) -> str:
        return f"length={self.length}, iterations={self.iterations}"


class EquilibriumLanguageModel(SymbolModel):
    r"""A language model of one :class:`implicit_attn.DEQTransformer`, one shared block at its fixed point.

    It has the parameters of a ``LanguageModel`` of one layer. With numbers of ``iterations`` the logits
    depend on no later symbol, bit by bit.

    Args:
        vocabulary, dim, length: as for ``SymbolModel``.
        heads: attention heads.
        hidden: hidden units of the feed-forward part; None: 4 d.
        iterations, gradient, layer: of the ``DEQTransformer``. Drawn numbers make the end a fixed point.
        dropout: share of token values that are set to 0 in training.

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
        # Tokens are normalised: what counts is how fast embeddings turn, and how large the block is.
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)

    @property
    def last(self) -> Any:
        return self.block.last

    def mix(self, tokens: Tensor, iterations: Iterations | None) -> Tensor:
        return self.block(tokens, iterations=iterations) if len(tokens) else tokens

    def extra_repr(self) -> str:
        return f"length={self.length}"


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
    """Continue each row of ``prompt`` by ``count`` symbols, ``P(c) = softmax(logits / temperature)``.

    The model sees the last ``model.length`` symbols. It is used in evaluation mode and left as it was.

    Args:
        model: with ``length`` and ``forward(symbols (B, N)) -> logits (B, N, V)``.
        prompt: (B, N) integers, N >= 1.
        count: symbols to add.
        temperature: >= 0; 0 takes the likeliest symbol.
        most: draw among the so many likeliest symbols only; None: among all.
        generator: of the draws, a CPU generator; None: torch's own.
        iterations: of a model that takes them.

    Returns:
        (B, N + count), the prompt first.
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
    try:
        for _ in range(count):
            logits = model(symbols[:, -length:], **options)[:, -1].float().cpu()
            drawn = _draw(logits, temperature, most, generator)
            symbols = torch.cat((symbols, drawn.to(symbols)), 1)
    finally:
        for part, training in modes:
            part.training = training
    return symbols


def _draw(
    logits: Tensor, temperature: float, most: int | None, generator: torch.Generator | None
) -> Tensor:
    """One symbol of each row of ``logits`` (B, V), (B, 1)."""
    if temperature == 0.0:
        return logits.argmax(-1, keepdim=True)
    if most is not None and most < logits.shape[1]:
        kept = logits.topk(most, -1).indices
        logits = torch.full_like(logits, -torch.inf).scatter(1, kept, logits.gather(1, kept))
    # The likeliest is at 0, so that small temperatures send the others to -inf and not it to inf.
    apart = (logits - logits.amax(-1, keepdim=True)).double() / temperature
    return torch.multinomial(apart.softmax(-1), 1, generator=generator)

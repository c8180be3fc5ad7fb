"""Causal language models: unrolled, as one block at its fixed point, and text from them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.data.text import decode, encode
from implicit_attn.deq import DEQ
from implicit_attn.models.attention import AttentionForm, build_attention_form
from implicit_attn.updates.momentum import DescentStep
from implicit_attn.updates.update import Update
from solvers.core.checks import require_choice, require_count, require_nonnegative, require_number

SCALE = 0.02  # standard deviation of weights at the start, as in GPT-2


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


def check_dropout(dropout: float) -> float:
    """A share of values that are dropped, in [0, 1)."""
    if require_number("dropout", dropout, low=0.0, high=1.0) == 1.0:
        raise ValueError("dropout must be < 1, got 1.0")
    return dropout


def draw_weights(model: nn.Module, outputs: Iterable[nn.Linear], sublayers: int) -> None:
    """Weights from N(0, 0.02^2), biases 0, those of ``outputs`` divided by ``sqrt(sublayers)``.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2, 2019).
    """
    for part in model.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=SCALE)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
    for part in outputs:
        nn.init.normal_(part.weight, std=SCALE * sublayers**-0.5)


def output_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers at the ends of the branches."""
    found = []
    for part in model.modules():
        if isinstance(part, AttentionBranch):
            found.append(part.attention.output)
        elif isinstance(part, FeedForwardBranch):
            found.append(part.narrow)
    return found


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

    def generate(self, prompt: str, count: int, **options: Any) -> str:
        """``prompt`` continued by ``count`` characters; options as of :func:`generate`.

        Raises:
            ValueError: the model has no ``alphabet``, or the prompt is empty or not written in it.
        """
        if self.alphabet is None:
            raise ValueError(
                "generate needs the model's alphabet, got none: set model.alphabet, or use "
                "implicit_attn.models.generate with numbers of symbols"
            )
        if not prompt:
            raise ValueError("prompt must hold a character at least, got none")
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


SOLVES = ("truncated", "implicit", "unrolled")
WINDOW = 4  # evaluations that a truncated gradient goes through


class CausalBlock(Update):
    r"""``f(z, x) = (1 - a) z + a (h + v(h))``, ``h = x + u(z)``: attention u among the states, then v.

    The input x enters every evaluation. Where both branches are bounded, f has a fixed point whatever the
    weights: so for branches that begin with a LayerNorm, with softmax attention or a series of finite
    order, but not with the exact inverses of "newton" and "light-newton". Token i depends on tokens
    ``j <= i`` alone.

    Args:
        attention: u, (B, N, d) -> (B, N, d), causal.
        feedforward: v, of each token by itself.
        damping: a, in (0, 1].
    """

    def __init__(
        self, attention: nn.Module, feedforward: nn.Module, *, damping: float = 1.0
    ) -> None:
        super().__init__()
        self.attention, self.feedforward = attention, feedforward
        self.damping = require_number("damping", damping, low=0.0, high=1.0, closed=False)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            raise ValueError("mask must be None: a CausalBlock has no masked tokens, got one")
        h = x + self.attention(z)
        return torch.lerp(z, h + self.feedforward(h), self.damping)


class EquilibriumLanguageModel(SymbolModel):
    r"""A language model of one shared block at its fixed point, ``z* = x + u(z*) + v(x + u(z*))``.

    x are the tokens after a LayerNorm without weights: from small ones the LayerNorms of the block would
    be steep. It has the parameters of a ``LanguageModel`` of one layer. No bound keeps the block a
    contraction: watch ``last.residual``, or the share of converged samples in a log of the training.

    The block is evaluated a fixed number of times, ``z <- f(z, x)`` from ``z = x``, for a reason: a
    stopping rule or a mixture of iterates that looks at a whole sample, as Anderson's, would carry
    information from later symbols to earlier ones. So logits depend on no later symbol, bit by bit, and
    how well the equation is solved is reported instead: ``last.residual`` after each call.

    Args:
        vocabulary, dim, length: as for ``SymbolModel``.
        heads: attention heads, a divisor of d.
        attention: the form of attention, a key of ``ATTENTION_FORMS``.
        hidden: hidden units of the feed-forward part; None: 4 d.
        iterations: evaluations of the block, at least 2; a call may ask for any other number.
        gradient: "truncated": back-propagation through the last four evaluations, with memory of these.
            Where the iterates run apart this gradient shows it: the block stayed a contraction in the
            trainings of ``docs/results.md``. "implicit": by the implicit function theorem at the last
            iterate, with memory of one evaluation; right only where the equation is solved,
            and once the block is no contraction nothing brings it back. "unrolled": through
            all iterations, the control. The first two measure the residual by one of the evaluations.
        damping: a of ``CausalBlock``.
        dropout: share of token values that are set to 0 in training. The block has none: it must be
            the same map in every evaluation.
        layer: options of the ``DEQ``: tolerance (of what counts as converged), on_failure, and with
            ``gradient="implicit"`` the adjoint.
        form: further arguments of the attention form.

    Attributes:
        last: status, residual and evaluations of each sample in the latest call, a ``solvers.Solution``
            without its value; None before one, and always with ``gradient="unrolled"``.

    Shapes: symbols (B, N) -> logits (B, N, V), causal.

    Source: Bai, Kolter, Koltun, "Deep Equilibrium Models", https://arxiv.org/abs/1909.01377, for
    language models of one block at its fixed point.
    """

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        heads: int,
        length: int,
        *,
        attention: str = "softmax",
        hidden: int | None = None,
        iterations: int = 12,
        gradient: str = "truncated",
        damping: float = 1.0,
        dropout: float = 0.1,
        layer: dict[str, Any] | None = None,
        form: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(vocabulary, dim, length, check_dropout(dropout))
        hidden = 4 * dim if hidden is None else hidden
        self.iterations = require_count("iterations", iterations, low=2)
        self.gradient = require_choice("gradient", gradient, SOLVES)
        made = build_attention_form(attention, dim, heads, **(form or {}))
        block = CausalBlock(
            AttentionBranch(dim, made, 0.0), FeedForwardBranch(dim, hidden, 0.0), damping=damping
        )
        taken = {"max_steps", "solver", "init"} | (set() if gradient == "implicit" else {"adjoint"})
        fixed = sorted(taken & set(layer or {}))
        if fixed:
            raise ValueError(
                f"layer must not hold {fixed}: the block is evaluated ``iterations`` times from x, "
                f"and its gradient is {gradient!r}"
            )
        # The one evaluation of a solve measures the residual; no step follows it.
        options: dict[str, Any] = {"on_failure": "ignore"} | (layer or {}) | {"max_steps": 1}
        if gradient != "implicit":
            options["adjoint"] = None
        self.layer = DEQ(block, **options)
        self.layer.evaluations_before = self.iterations - 1
        draw_weights(self, output_layers(self), 2)

    @property
    def last(self) -> Any:
        return self.layer.last

    def mix(self, tokens: Tensor, iterations: int | None) -> Tensor:
        count = self.iterations if iterations is None else iterations
        tokens = F.layer_norm(tokens, (self.dim,))
        if self.gradient == "unrolled" or not len(tokens):
            return self._iterate(tokens, count)
        if count < 2:
            raise ValueError(f'iterations must be >= 2 unless gradient="unrolled", got {count}')
        window = min(WINDOW, count - 1) if self.gradient == "truncated" else 0
        with torch.no_grad():
            z = self._iterate(tokens, count - 1 - window)
        self.layer.evaluations_before = count - 1
        if self.gradient == "implicit":
            return self.layer(tokens, z0=z)
        z = self._iterate(tokens, window, z)
        with torch.no_grad():
            self.layer(tokens, z0=z)  # for the residual
        return z

    def _iterate(self, tokens: Tensor, count: int, start: Tensor | None = None) -> Tensor:
        z: Tensor = tokens if start is None else start
        for _ in range(count):
            z = self.layer.update(z, tokens)
        return z

    def extra_repr(self) -> str:
        return f"length={self.length}, iterations={self.iterations}, gradient={self.gradient}"


@torch.no_grad()
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

"""A language model of one causal block, solved for its fixed point."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.deq import DEQ
from implicit_attn.models.attention.forms import build_attention_form
from implicit_attn.models.language.language_model import SymbolModel
from implicit_attn.models.language.sublayers import (
    AttentionBranch,
    FeedForwardBranch,
    check_dropout,
    draw_weights,
    output_layers,
)
from implicit_attn.updates.update import Update
from solvers.core.checks import require_choice, require_count, require_number

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

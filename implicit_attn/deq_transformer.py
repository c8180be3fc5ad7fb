"""The DEQ transformer: one transformer block, its input added to the normalised state, at its fixed point."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.block import EncoderLayer, check_layer
from implicit_attn.deq import DEQ, UnrolledLayer
from implicit_attn.updates.transformer_step import TransformerStep
from solvers.core.checks import require_choice, require_count

Iterations = int | tuple[int, int] | str


class DEQTransformer(EncoderLayer):
    r"""``x -> z*`` with ``z* = block(LN(z* + x))``: one pre-norm transformer block at its fixed point.

    x is the input after an rms norm, and where the iteration ``z <- block(LN(z + x))`` begins; the block is
    :class:`implicit_attn.updates.TransformerStep`, attention among the states and a feed-forward part.
    Unlike in :class:`implicit_attn.EquilibriumBlock` a token decides anew at every evaluation where to
    attend, so that iterations give what depth gives. Nothing makes the map a contraction; that its end is
    a fixed point is learned, best with numbers of iterations that are drawn in training.

    Args:
        dim: features d of a token.
        heads: attention heads, a divisor of d.
        hidden: hidden units; None: ``4 dim``.
        attention: "self", or "cross", among the tokens of a ``memory``.
        activation: of the hidden units, "gelu" or "relu".
        memory_dim: features of the memory's tokens, with ``attention="cross"``; None: ``dim``.
        causal: token i sees the tokens ``j <= i`` alone.
        iterations: how often the block is evaluated: a number; a pair (least, most) from which each call
            in training draws one, and of which evaluation takes the middle; or "converged": until every
            sample has converged, as ``layer`` says. With numbers what is computed at a causal token
            depends on no later token, bit by bit. "converged" stops by a residual that all tokens of a
            sample share, so later tokens reach earlier ones within the tolerance. "prefix", of causal
            blocks: plain iteration, in which a token rests as soon as it and all tokens before it have
            converged; no bit of it depends on a later token, and resting tokens cost but their keys and
            values. ``evaluations`` then holds those of each token.
        gradient: "all": through all iterations. A number k: through the last k of them (truncated
            back-propagation), with memory of these; at "converged" k further ones from the end,
            :class:`solvers.Phantom`. "implicit": by the implicit function theorem, with the memory of one
            evaluation and one evaluation more; right only where the iteration has arrived. "prefix"
            needs a number or "implicit".
        dropout: of the injected input and of the output, outside the solve.
        batch_first: tokens are (B, N, d), else (N, B, d) as ``nn.Transformer``'s are by default.
        layer: options of :class:`implicit_attn.DEQ`, for ``solve`` and "converged": Anderson to the
            relative tolerance 1e-3 by default. ``adjoint`` needs ``gradient="implicit"``.

    The output has no further residual connection: ``LN(z + x)`` already carries x. Padding comes out as 0.

    Example:
        >>> import torch
        >>> block = DEQTransformer(64, heads=4, iterations=(4, 20), gradient=4)
        >>> x = torch.randn(2, 16, 64)
        >>> block(x).shape
        torch.Size([2, 16, 64])
        >>> solution = block.eval().solve(x)  # until converged, with status and residual

    Source: Bai, Kolter, Koltun, "Deep Equilibrium Models" (2019), https://arxiv.org/abs/1909.01377, whose
    transformer block has its norms behind the sublayers; numbers drawn in training as in Geiping et al.,
    "Scaling up Test-Time Compute with Latent Reasoning" (2025), https://arxiv.org/abs/2502.05171.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int | None = None,
        *,
        attention: str = "self",
        activation: str = "gelu",
        memory_dim: int | None = None,
        causal: bool = False,
        iterations: Iterations = 12,
        gradient: int | str = "all",
        dropout: float = 0.0,
        batch_first: bool = True,
        layer: dict[str, Any] | None = None,
    ) -> None:
        attention = require_choice("attention", attention, ("self", "cross"))
        super().__init__(dim, heads, attention, memory_dim, causal, dropout, batch_first)
        self.iterations = check_iterations(iterations)
        self.evaluations: Tensor | None = None
        options = check_layer(layer)
        adjoint: Any
        if isinstance(gradient, str):
            self.gradient: int | str = require_choice("gradient", gradient, ("all", "implicit"))
            adjoint = solvers.Unrolled() if gradient == "all" else solvers.Implicit()
        else:
            self.gradient = require_count("gradient", gradient)
            adjoint = solvers.Phantom(steps=self.gradient)
        if gradient != "implicit" and "adjoint" in options:
            raise ValueError(f'layer["adjoint"] needs gradient="implicit", got {gradient!r}')
        step = TransformerStep(
            dim, heads, hidden, activation=activation, causal=causal,
            cross=attention == "cross", memory_dim=memory_dim,
        )  # fmt: skip
        self.deq = DEQ(step, **({"adjoint": adjoint} | options))

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        memory: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        iterations: Iterations | None = None,
    ) -> Tensor:
        """The block's output, as ``nn.TransformerEncoderLayer`` is called.

        Args:
            src, src_mask, src_key_padding_mask, is_causal, memory, memory_key_padding_mask: as for
                :meth:`implicit_attn.EquilibriumBlock.forward`.
            iterations: of this call; None: those of the constructor.
        """
        x, given, mask = self.arguments(
            src, src_mask, src_key_padding_mask, is_causal, memory, memory_key_padding_mask
        )
        count = self._count(self.iterations if iterations is None else check_iterations(iterations))
        if isinstance(self.deq, UnrolledLayer):  # put here by unroll()
            z = self.deq(given, mask)
        elif isinstance(count, str):
            tolerance, start = self._tolerance(x), {}
            if count == "prefix":
                start = {"z0": self._by_prefix(given, mask, tolerance), "max_steps": 1}
            z = self.deq(given, mask, tolerance=tolerance, **start)
            self.deq.evaluations_before = 0
        elif self.gradient != "implicit":
            window = None if self.gradient == "all" else self.gradient
            z = self.deq.unrolled(count, window=window)(given, mask)  # type: ignore[arg-type]
        else:
            with torch.no_grad():
                start = self.deq.unrolled(count)(given, mask)
            # Its one evaluation is linearised, and measures the residual.
            self.deq.evaluations_before = count
            z = self.deq(given, mask, z0=start, max_steps=1, on_failure="ignore")
            self.deq.evaluations_before = 0
        return self._like(src, self.dropout(z))

    def _by_prefix(
        self, given: Any, mask: Tensor | None, tolerance: solvers.Tolerance | None
    ) -> Tensor:
        """Plain iteration; a token rests when it and all before it have moved by half the tolerance."""
        if not self.causal:
            raise ValueError('iterations="prefix" needs causal=True: tokens have no prefix')
        if torch.is_grad_enabled() and self.gradient == "all":
            raise ValueError(
                'iterations="prefix" needs torch.no_grad(), gradient="implicit" or a number'
            )
        step: Any = self.deq.update
        limit = tolerance or solvers.Tolerance(1e-2)  # half precision
        with torch.no_grad():
            held = step.prepare(given, mask=mask).parts
            z = held.tokens.clone()
            seen = torch.ones_like(z[..., 0], dtype=torch.bool) if mask is None else mask
            going = seen.clone()
            self.evaluations = torch.zeros_like(going, dtype=torch.int64)
            for _ in range(self.deq.max_steps):
                first = int(going.any(0).int().argmax())
                old, rest = z[:, first:], going[:, first:]
                value = step.at(z, held, mask, first)
                apart, size = (value - old).norm(dim=-1), value.norm(dim=-1)
                self.evaluations[:, first:] += rest
                z[:, first:] = torch.where(rest[..., None], value, old)
                moved = rest & (apart > 0.5 * limit.threshold(size))
                going[:, first:] = moved.int().cummax(1).values.bool() & seen[:, first:]
                if not going.any():
                    break
        self.deq.evaluations_before = self.evaluations.amax(1)
        return z

    def _count(self, iterations: Iterations) -> int | str:
        """The number of evaluations of a call, or how it ends."""
        if isinstance(iterations, int | str):
            return iterations
        low, high = iterations
        return int(torch.randint(low, high + 1, ())) if self.training else (low + high) // 2

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, gradient={self.gradient!r}"


def check_iterations(iterations: Any) -> Iterations:
    """A number, a pair (least, most), "converged" or "prefix"."""
    if isinstance(iterations, str):
        return require_choice("iterations", iterations, ("converged", "prefix"))
    if not isinstance(iterations, (tuple, list)):
        return require_count("iterations", iterations)
    if len(iterations) != 2:
        raise ValueError(f"iterations must be a number or (least, most), got {iterations!r}")
    low, high = (require_count("iterations", number) for number in iterations)
    if low > high:
        raise ValueError(f"iterations must be (least, most), got {iterations!r}")
    return low, high

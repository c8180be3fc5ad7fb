"""Blocks that replace a transformer layer: the equilibrium block and the DEQ transformer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn.deq import DEQ, UnrolledLayer
from implicit_attn.energies.conditional import ConditionalAttention, EquilibriumEnergy
from implicit_attn.energies.energy import AttentionContext
from implicit_attn.energies.feedforward import GELUFeedForward, ReLUFeedForward
from implicit_attn.energies.heads import AttentionInput
from implicit_attn.energies.tokens import hide
from implicit_attn.updates.transformer_step import TransformerStep
from implicit_attn.updates.update import GradientStep
from solvers.core.argument_names import hint_names
from solvers.core.checks import (
    require_choice,
    require_count,
    require_flag,
    require_instance,
    require_number,
)
from solvers.core.modes import (
    in_transform,
)
from solvers.core.tolerance import UsualTolerance

EPSILON = 1e-5  # epsilon of the norm of the input
TOLERANCE = UsualTolerance(1e-3)  # of a block
ATTENTIONS = ("self", "cross", None)
MEMORIES: dict[str, Any] = {"relu": ReLUFeedForward, "gelu": GELUFeedForward}
# GELU' <= 1.129, so the curvature of its integral exceeds that of relu(y)^2 / 2 by this factor.
STEEPEST = {"relu": 1.0, "gelu": 1.13}


class EncoderLayer(nn.Module):
    """Base class of blocks with the tokens and masks of ``nn.TransformerEncoderLayer``.

    Attributes:
        deq: the DEQ layer, whose input is an ``AttentionInput``.
        memory_dim: features of the memory's tokens for ``attention="cross"``.
    """

    deq: DEQ
    memory_dim: int

    def __init__(
        self,
        dim: int,
        heads: int,
        attention: str | None,
        memory_dim: int | None,
        causal: bool,
        dropout: float,
        batch_first: bool,
    ) -> None:
        super().__init__()
        self.dim, self.heads = require_count("dim", dim), require_count("heads", heads)
        self.attention = attention
        if memory_dim is not None and attention != "cross":
            raise ValueError(f'memory_dim needs attention="cross", got attention={attention!r}')
        self.memory_dim = dim if memory_dim is None else require_count("memory_dim", memory_dim)
        if require_flag("causal", causal) and attention != "self":
            raise ValueError(f'causal=True needs attention="self", got {attention!r}')
        self.causal, self.batch_first = causal, require_flag("batch_first", batch_first)
        self.dropout = nn.Dropout(require_number("dropout", dropout, low=0.0, high=1.0))

    @property
    def self_attn(self) -> EncoderLayer:
        """The block itself, because ``nn.TransformerEncoder`` reads ``self_attn.batch_first``."""
        return self

    @property
    def last(self) -> solvers.Solution | None:
        """Status, residual and evaluations of each sample in the latest solve (``DEQ.last``)."""
        return self.deq.last

    def solve(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        memory: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        **options: Any,
    ) -> solvers.Solution:
        """Return the :class:`solvers.Solution` of the state z*; ``src`` and masks as in ``forward``.

        ``options`` are those of :meth:`implicit_attn.DEQ.solve`. The state is always (B, N, state_dim).
        """
        _, x, mask = self._arguments(
            src, src_mask, src_key_padding_mask, is_causal, memory, memory_key_padding_mask
        )
        return self.deq.solve(x, mask, **self._options(is_causal, options))

    def stream(
        self, inputs: Iterable[Any], *, slots: int = 128, masked: bool = False, **options: Any
    ) -> Iterator[tuple[Tensor, solvers.Solution]]:
        """Solve all samples of ``inputs`` in slots that are refilled; see :meth:`implicit_attn.DEQ.stream`.

        The solutions are those of the state, as in :meth:`solve`.

        Args:
            inputs: batches ``src`` of tokens, or one of them.
            masked: whether each batch is a pair ``(src, src_key_padding_mask)``.
            slots, options: see :meth:`implicit_attn.DEQ.stream`.
        """

        def read(batch: Any) -> Any:
            src, padding = batch if masked else (batch, None)
            _, x, mask = self._arguments(src, None, padding)
            return (x, mask) if masked else x

        batches = map(read, [inputs] if isinstance(inputs, Tensor) else inputs)
        return self.deq.stream(batches, slots=slots, masked=masked, **options)

    def _options(self, is_causal: bool, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a solve, made of those of the call."""
        return options

    def _arguments(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        padding: Tensor | None = None,
        is_causal: bool | None = False,
        memory: Tensor | None = None,
        memory_padding: Tensor | None = None,
    ) -> tuple[Tensor, AttentionInput, Tensor | None]:
        """Return tokens (B, N, d), the input of the layer, and the mask of unpadded tokens (B, N)."""
        tokens = self._tokens("src", src, self.dim)
        if memory is None and self.attention == "cross":
            raise ValueError('memory must be a tensor when attention="cross", got None')
        if self.attention != "cross" and (memory is not None or memory_padding is not None):
            raise ValueError(f'memory needs attention="cross", got attention={self.attention!r}')
        pairs = bias = seen = None
        if self.attention is None and (src_mask is not None or is_causal):
            raise ValueError("src_mask and is_causal need attention, got attention=None")
        if memory is not None:
            memory = self._tokens("memory", memory, self.memory_dim)
            seen = _counted_tokens("memory_key_padding_mask", memory_padding, memory)
            memory = _normalised(memory, seen)
        batch, count, _ = tokens.shape
        keys = count if memory is None else memory.shape[1]
        if src_mask is not None:
            # What overflows in half precision excludes, as -inf does.
            floats = isinstance(src_mask, Tensor) and src_mask.is_floating_point()
            own = src_mask.to(tokens.dtype) if floats else src_mask
            pairs, bias = _allowed_pairs(own, (batch, self.heads, count, keys))
        if is_causal and not self.causal:
            if self.attention == "cross":
                raise ValueError('is_causal=True needs attention="self", got "cross"')
            order = torch.ones(keys, keys, dtype=torch.bool, device=tokens.device).tril()
            pairs = order if pairs is None else pairs & order
        mask = _counted_tokens("src_key_padding_mask", padding, tokens)
        dropped = self.dropout(_normalised(tokens, mask))
        return tokens, AttentionInput(dropped, pairs, bias, memory, seen), mask

    def _tokens(self, name: str, tokens: Any, width: int) -> Tensor:
        """Convert tokens (N, width) or (N, B, width) to (B, N, width)."""
        if (
            not isinstance(tokens, Tensor)
            or tokens.dim() not in (2, 3)
            or tokens.shape[-1] != width
        ):
            got = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            layout = f"(B, N, {width})" if self.batch_first else f"(N, B, {width})"
            raise ValueError(f"{name} must have the shape {layout} or (N, {width}), got {got}")
        if not tokens.is_floating_point():
            raise TypeError(f"{name} must have a floating-point dtype, got {tokens.dtype}")
        if tokens.dim() == 2:
            return tokens.unsqueeze(0)
        return tokens if self.batch_first else tokens.transpose(0, 1)

    def _like(self, src: Tensor, y: Tensor) -> Tensor:
        """Convert ``y`` (B, N, d) to the layout of ``src``."""
        if src.dim() == 2:
            return y.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1)


class BlockCache(NamedTuple):
    """What :meth:`EquilibriumBlock.step` keeps of earlier tokens.

    Attributes:
        key, value: keys and values of M tokens, (B, heads, M, p).
    """

    key: Tensor
    value: Tensor


class EquilibriumBlock(EncoderLayer):
    r"""Transformer layer ``x -> x + z*(x)`` with ``z* = argmin_z E(z; rms_norm(x))``.

    The energy is :class:`implicit_attn.energies.EquilibriumEnergy`: ``1/2 |z|^2`` plus softmax attention
    and hidden units that depend on the input::

        E = 1/2 |z|^2 - tau^-1 sum_hi log sum_j P0_ij(x) exp(tau (W_h z_i).v_j(x))
                      - 1/2 sum_im relu((D z_i + U x_i + c)_m)^2

    The spectral norms of W and D are bounded, so for any weights and input the Hessian has eigenvalues
    from ``1 - sum(curvature)`` to 1 (for gelu, to ``1 + 0.13 curvature[1]``). The minimum is therefore
    unique, and the solves for it and for the gradients converge, mostly within four or five evaluations.
    The first gradient step from zero is a feed-forward block and attention of the same shapes as in
    ``nn.TransformerEncoderLayer``, with as many parameters for ``hidden = dim_feedforward``.

    Args:
        dim: features d of a token.
        heads: number of attention heads, a divisor of ``state_dim``.
        hidden: number of hidden units M; None for ``2 dim``, 0 for attention only.
        attention: "self", "cross" (to the tokens of a ``memory``), or None for hidden units only.
        activation: activation of the hidden units, "relu" or "gelu".
        memory_dim: features of the memory's tokens for ``attention="cross"``; None for ``dim``.
        state_dim: features s of the state z; None for d. Otherwise the output is ``x + O z*``.
        causal: whether token i depends only on the tokens ``j <= i``, bit for bit. Each token is then solved
            on its own, since the tokens interact through the input only. If you pass ``record``, ``callback``
            or ``stop`` to a call, name a solver that needs an energy, exchange a term of the energy, or after
            ``block.deq.compile()`` on a GPU, all tokens of a sample share a residual, and later tokens then
            affect earlier ones within the tolerance.
        curvature: bounds (attention, hidden units) on the curvature, > 0 with a sum < 1. With smaller
            bounds the block is closer to its first gradient step.
        dropout: dropout probability of the input of attention and hidden units and of ``z*``.
        batch_first: whether tokens are (B, N, d) or, as ``nn.Transformer``'s default, (N, B, d).
        layer: options of :class:`implicit_attn.DEQ`. The default relative tolerance is 1e-3, and that of
            DEQ in half precision.

    Example:
        >>> import torch
        >>> block = EquilibriumBlock(64, heads=4)
        >>> y = block(torch.randn(2, 16, 64))  # (B, N, 64) -> (B, N, 64)
        >>> y.shape, bool(block.last.converged.all())
        (torch.Size([2, 16, 64]), True)

    To stack blocks, use ``nn.Sequential(*(EquilibriumBlock(64, heads=4) for _ in range(3)))``.
    """

    @hint_names
    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int | None = None,
        *,
        attention: str | None = "self",
        activation: str = "relu",
        memory_dim: int | None = None,
        state_dim: int | None = None,
        causal: bool = False,
        curvature: tuple[float, float] = (0.45, 0.45),
        dropout: float = 0.0,
        batch_first: bool = True,
        layer: dict[str, Any] | None = None,
    ) -> None:
        attention = require_choice("attention", attention, ATTENTIONS)  # type: ignore[arg-type]
        super().__init__(dim, heads, attention, memory_dim, causal, dropout, batch_first)
        hidden = 2 * dim if hidden is None else require_count("hidden", hidden, low=0)
        state = dim if state_dim is None else require_count("state_dim", state_dim)
        self.hidden, self.activation = hidden, require_choice("activation", activation, MEMORIES)
        self.curvature, self.state_dim = _check_curvature(curvature), state
        attends = recalls = None
        if attention is not None:
            source = self.memory_dim if attention == "cross" else None
            attends = ConditionalAttention(
                state, heads, context_dim=dim, memory_dim=source, curvature=self.curvature[0],
                learned_beta=True, causal=causal,
            )  # fmt: skip
        if hidden:
            bound = (self.curvature[1] / STEEPEST[activation]) ** 0.5
            memory = MEMORIES[activation]
            recalls = memory(state, hidden, context_dim=dim, norm=None, bound=bound)
        output = None if state_dim is None else nn.Linear(state, dim, bias=False)
        if output is not None:
            nn.init.normal_(output.weight, std=state**-0.5)
        energy = EquilibriumEnergy(attends, recalls, output)
        energy.modulus = 1.0 - sum(self.curvature)
        step = _BlockStep(energy)
        self.deq = DEQ(step, **_layer_options(layer))
        step.monitored = self.deq.solver is not None and self.deq.solver.needs_energy

    def _options(self, is_causal: bool, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of the solve; if it is causal, each token is a row of its own.

        The energy's tokens interact through the input only.
        """
        if not (self.causal or is_causal):
            return options
        chosen = self.deq._options() | options
        watched = bool(chosen.get("record")) or any(
            chosen.get(name) is not None for name in ("callback", "stop")
        )
        apart = not (watched or self.deq.update.monitored or self.energy.is_replaced)
        return options | {"token_rows": apart}

    @property
    def energy(self) -> EquilibriumEnergy:
        return self.deq.update.energy  # type: ignore[return-value]

    @property
    def output(self) -> nn.Module | None:
        """The map O from the state to the width of the tokens, or None if they are equal."""
        return self.energy.output

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        memory: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the output for the arguments of ``nn.TransformerEncoderLayer``.

        Args:
            src: (B, N, d), or (N, d) for one sample, or (N, B, d) with ``batch_first=False``.
            src_mask: (N, M), (B, N, M), (B heads, N, M) or (B or 1, heads or 1, N, M), bool with True at
                excluded pairs, or floating-point and added to the scores (-inf excludes). M is N, or the
                number of tokens of the memory.
            src_key_padding_mask: (B, N), bool with True at padding, or floating-point with -inf at padding
                and 0 elsewhere. The block returns padding unchanged.
            is_causal: like the option ``causal``, for this call.
            memory: (B, M, memory_dim) for ``attention="cross"``, in the layout of ``src``.
            memory_key_padding_mask: (B, M) bool, True at padding of the memory.
            options: options of :meth:`implicit_attn.DEQ.solve` for this call.
        """
        if "mask" in options:
            raise TypeError(
                "the masks of a block are src_mask and src_key_padding_mask, True at what they exclude: pass "
                "src_key_padding_mask=~mask instead of mask=mask"
            )
        tokens, x, mask = self._arguments(
            src, src_mask, src_key_padding_mask, is_causal, memory, memory_key_padding_mask
        )
        if not isinstance(self.deq, UnrolledLayer):  # put here by unroll()
            options = self._options(is_causal, options)
        z = self.deq(x, mask, **options)
        z = self.dropout(z if self.output is None else self.output(z))
        return self._like(src, tokens + z)

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: BlockCache | None = None) -> tuple[Tensor, BlockCache]:
        """Return the outputs of tokens that follow those in the cache, and the cache with all of them.

        Keys and values of a causal block come from its input, so those of earlier tokens never change. The
        output is that of ``forward`` with all tokens, up to rounding, without gradients.

        Args:
            tokens: next tokens, one or more: (B, n, d), in the layout of ``src``.
            cache: cache of the previous call; None at the start of a sequence.

        Raises:
            ValueError: if the block is not causal.

        Example:
            >>> block = EquilibriumBlock(8, heads=2, causal=True).eval()
            >>> x = torch.randn(1, 5, 8)
            >>> first, cache = block.step(x[:, :4])
            >>> last, cache = block.step(x[:, 4:], cache)
            >>> torch.allclose(torch.cat([first, last], 1), block(x), atol=1e-5)
            True
        """
        if not self.causal:
            raise ValueError("step needs causal=True, got causal=False")
        src = self._tokens("tokens", tokens, self.dim)
        x = self.dropout(_normalised(src, None))
        context, known = self.energy.extend(x, cache)
        start = self.deq.update.start(AttentionInput(x), context)
        z = self.deq.solve(context, z0=start, token_rows=True, adjoint=None).value
        output = self.dropout(z if self.output is None else self.output(z))
        return self._like(tokens, src + output), BlockCache(*known)

    def __repr__(self) -> str:
        """Return the options; the modules are in ``block.deq``."""
        count = sum(parameter.numel() for parameter in self.parameters())
        return (
            f"EquilibriumBlock(dim={self.dim}, heads={self.heads}, hidden={self.hidden}, "
            f"state_dim={self.state_dim},\n  attention={self.attention!r}, activation={self.activation!r}, "
            f"causal={self.causal}, curvature={self.curvature},\n  dropout={self.dropout.p}, "
            f"batch_first={self.batch_first},\n  {type(self.deq).__name__}({self.deq.extra_repr()}),\n"
            f"  {count:,} parameters)"
        )


def _layer_options(given: Any) -> dict[str, Any]:
    """Return the options of a block's DEQ, with the default tolerance of blocks."""
    require_instance("layer", given, dict, "a dict of options of DEQ", optional=True)
    return {"tolerance": TOLERANCE} | (given or {})


def _normalised(x: Tensor, mask: Tensor | None) -> Tensor:
    return F.rms_norm(hide(x, mask), x.shape[-1:], eps=EPSILON)


class _BlockStep(GradientStep):
    """The unit gradient step, a contraction, for which most solvers need no energy."""

    energy: EquilibriumEnergy

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        read = isinstance(x, AttentionContext) and (mask is None or x.mask is not None)
        context = x if read else self.prepare(x, mask=mask)
        if self.energy.is_replaced or self.step_size != 1.0:
            return super().forward(z, context)
        return self.energy.unit_step(z, context)

    def start(self, x: AttentionInput, prepared: Any) -> Tensor:
        """Return the gradient step of the hidden units at zero, which saves an evaluation, or zero."""
        answer = prepared.start
        if answer is not None:
            return answer
        assert x.tokens is not None and self.energy.attention is not None
        return x.tokens.new_zeros(*x.tokens.shape[:2], self.energy.attention.dim)


def _check_curvature(curvature: Any) -> tuple[float, float]:
    if not isinstance(curvature, (tuple, list)) or len(curvature) != 2:
        raise TypeError(
            f"curvature must be a pair of numbers (attention, memory), got {curvature!r}"
        )
    first, second = (require_number("curvature", c, low=0.0, closed=False) for c in curvature)
    if first + second >= 1.0:
        raise ValueError(f"curvature must sum to less than 1 for a unique minimum, got {curvature}")
    return first, second


Iterations = int | tuple[int, int] | str


class DEQTransformer(EncoderLayer):
    r"""Pre-norm transformer block at its fixed point, ``x -> z*`` with ``z* = block(LN(z* + x))``.

    x is the input after an RMS norm and the start of the iteration ``z <- block(LN(z + x))``. The block is
    :class:`implicit_attn.updates.TransformerStep`, attention among the states and a feed-forward part.
    Unlike :class:`implicit_attn.EquilibriumBlock` it recomputes queries, keys and values from the state at
    every evaluation, so iterations act like depth. The map need not be a contraction. Training with
    random numbers of iterations teaches it to converge to a fixed point.

    Args:
        dim: features d of a token.
        heads: number of attention heads, a divisor of d.
        hidden: number of hidden units; None for ``4 dim``.
        attention: "self", or "cross" (to the tokens of a ``memory``).
        activation: activation of the hidden units, "gelu" or "relu".
        memory_dim: features of the memory's tokens for ``attention="cross"``; None for ``dim``.
        causal: whether token i depends only on the tokens ``j <= i``.
        iterations: number of evaluations of the block; or a pair (low, high), from which training draws
            a number for each call and evaluation takes the middle; or "converged", until every sample
            has converged by the options in ``layer``. With a number, a causal token does not depend on
            later tokens, bit by bit. "converged" uses a residual over all tokens of a sample, so later
            tokens influence earlier ones within the tolerance.
        gradient: "all" for gradients through all iterations; a number k for the last k iterations
            (truncated back-propagation) or, with "converged", k additional ones
            (:class:`solvers.Phantom`); "implicit" for the implicit function theorem, with the memory of one
            evaluation, which is correct only if the iteration has converged.
        dropout: dropout probability of the injected input and of the output.
        batch_first: whether tokens are (B, N, d) or, as ``nn.Transformer``'s default, (N, B, d).
        layer: options of :class:`implicit_attn.DEQ` for ``solve`` and "converged", by default Anderson
            with relative tolerance 1e-3. ``adjoint`` needs ``gradient="implicit"``.

    There is no other residual connection, because ``LN(z + x)`` contains x. The output is 0 at padding.

    Example:
        >>> import torch
        >>> block = DEQTransformer(64, heads=4, iterations=(4, 20), gradient=4)
        >>> x = torch.randn(2, 16, 64)
        >>> block(x).shape
        torch.Size([2, 16, 64])
        >>> solution = block.eval().solve(x)  # until converged, with status and residual

    Source: Bai, Kolter, Koltun, "Deep Equilibrium Models" (2019), https://arxiv.org/abs/1909.01377, whose
    transformer block has its norms after the sublayers; random iteration numbers follow Geiping et al.,
    "Scaling up Test-Time Compute with Latent Reasoning" (2025), https://arxiv.org/abs/2502.05171.
    """

    @hint_names
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
        options = _layer_options(layer)
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
        """Return the output for the arguments of ``nn.TransformerEncoderLayer``.

        Args:
            src, src_mask, src_key_padding_mask, is_causal, memory, memory_key_padding_mask: see
                :meth:`implicit_attn.EquilibriumBlock.forward`.
            iterations: iterations of this call; None for those of the constructor.
        """
        _, x, mask = self._arguments(
            src, src_mask, src_key_padding_mask, is_causal, memory, memory_key_padding_mask
        )
        count = self._count(self.iterations if iterations is None else check_iterations(iterations))
        if isinstance(self.deq, UnrolledLayer) or isinstance(count, str):  # put here by unroll()
            z = self.deq(x, mask)
        elif self.gradient != "implicit":
            window = None if self.gradient == "all" else self.gradient
            z = self.deq.unrolled(count, window=window)(x, mask)  # type: ignore[arg-type]
        else:
            with torch.no_grad():
                start = self.deq.unrolled(count)(x, mask)
            # One more evaluation is linearised and measures the residual.
            z = self.deq(x, mask, z0=start, max_steps=1, on_failure="ignore")
            if (last := self.deq.last) is not None:
                last.evaluations = last.evaluations + count
        return self._like(src, self.dropout(z))

    def _count(self, iterations: Iterations) -> int | str:
        """Return the number of evaluations of a call, or "converged"."""
        if isinstance(iterations, int | str):
            return iterations
        low, high = iterations
        return int(torch.randint(low, high + 1, ())) if self.training else (low + high) // 2

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, gradient={self.gradient!r}"


def check_iterations(iterations: Any) -> Iterations:
    """Return a number, a pair (low, high) or "converged"."""
    if isinstance(iterations, str):
        return require_choice("iterations", iterations, ["converged"])
    if not isinstance(iterations, (tuple, list)):
        return require_count("iterations", iterations)
    if len(iterations) != 2:
        raise ValueError(f"iterations must be a number or a pair (low, high), got {iterations!r}")
    low, high = (require_count("iterations", number) for number in iterations)
    if low > high:
        raise ValueError(f"iterations must be a pair with low <= high, got {iterations!r}")
    return low, high


def _counted_tokens(name: str, padding: Any, tokens: Tensor) -> Tensor | None:
    """Convert ``nn.Transformer``'s padding mask, (B, N) or (N,), to a mask that is True at real tokens.

    A floating-point mask, which ``nn.TransformerEncoder`` makes of every mask, is -inf at padding, else 0.
    """
    if padding is None:
        return None
    expected = tuple(tokens.shape[:2])
    if not isinstance(padding, Tensor) or not (
        padding.dtype == torch.bool or padding.is_floating_point()
    ):
        got = padding.dtype if isinstance(padding, Tensor) else type(padding).__name__
        raise TypeError(f"{name} must be a bool or floating-point tensor, got {got}")
    padding = padding.unsqueeze(0) if padding.dim() == 1 else padding
    if tuple(padding.shape) != expected:
        raise ValueError(f"{name} must have the shape {expected}, got {tuple(padding.shape)}")
    if padding.dtype == torch.bool:
        return ~padding
    known = padding.device.type == "cpu" and not in_transform()
    if known and not bool(((padding == 0) | padding.isneginf()).all()):
        raise ValueError(f"{name} of a floating-point dtype must contain only 0 and -inf (padding)")
    return padding == 0


def _allowed_pairs(
    mask: Any, shape: tuple[int, int, int, int]
) -> tuple[Tensor | None, Tensor | None]:
    """Convert ``nn.Transformer``'s pair mask to allowed pairs and a bias of their scores."""
    batch, heads, tokens, keys = shape
    given = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    if given == (batch * heads, tokens, keys):
        mask = mask.unflatten(0, (batch, heads))
    elif given not in ((tokens, keys), (batch, tokens, keys)) and given not in [
        (samples, each, tokens, keys) for samples in (1, batch) for each in (1, heads)
    ]:
        raise ValueError(
            f"src_mask must have the shape (N, M) = ({tokens}, {keys}), (B, N, M) with B = {batch}, "
            f"(B heads, N, M) with heads = {heads}, or (B or 1, heads or 1, N, M), got {given}"
        )
    if mask.dim() == 4 and len(mask) < batch:  # solvers take one mask a sample
        mask = mask.expand(batch, -1, -1, -1)
    if mask.dtype == torch.bool:
        return ~mask, None
    if not mask.is_floating_point():
        raise TypeError(f"src_mask must be a bool or floating-point tensor, got {mask.dtype}")
    allowed = ~mask.isneginf()
    known = mask.device.type == "cpu" and not in_transform()
    if known and not bool((mask.isfinite() | ~allowed).all()):
        raise ValueError("src_mask must be finite or -inf, got NaN or inf")
    return allowed, mask.masked_fill(~allowed, 0.0)

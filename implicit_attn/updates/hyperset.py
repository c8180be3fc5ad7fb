"""Hyper-SET: its layer, step sizes, low-rank differences, and the additions of its official code."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.attention import (
    SCORES,
    BiSoftmaxAttention,
    HeadsEnergy,
    LinearAttention,
    RowSoftmaxAttention,
    ScoreAttention,
)
from implicit_attn.energies.energy import AttentionContext, inverse_softplus
from implicit_attn.energies.feedforward import MemoryEnergy, build_attention, build_feedforward
from implicit_attn.energies.tokens import (
    FEATURE_MAPS,
    Mask,
    RMSNorm,
    hide,
    like_state,
    merge_heads,
    split_heads,
)
from implicit_attn.kernels import bisoftmax
from implicit_attn.updates.update import move
from solvers.core.checks import require_choice, require_count, require_number, require_positive

TINY_NORM = 1e-6
STEP_SIZES = ("conditioned-state", "conditioned-input", "learned", "fixed")
LONGEST_PERIOD = 10_000.0

Step = float | Tensor


class StepSize(nn.Module):
    """A positive step size, a number or learned for each channel, ``log(1 + exp(raw))``, (d,)."""

    def __init__(self, initial: float, channels: int | None = None) -> None:
        super().__init__()
        self.initial, self.raw = float(require_positive("step_size", initial)), None
        if channels is not None:
            self.raw = nn.Parameter(torch.full((channels,), inverse_softplus(initial)))

    def forward(self) -> float | Tensor:
        return self.initial if self.raw is None else F.softplus(self.raw)

    def extra_repr(self) -> str:
        return f"initial={self.initial}"


class StepSizes(nn.Module):
    """Step sizes of the attention step and of the feed-forward step for each iteration."""

    @abstractmethod
    def prepare(self, x0: Tensor, times: Tensor) -> Any:
        """Return the context of ``forward``, computed once from the input (B, N, d) and times (T,)."""

    @abstractmethod
    def forward(self, z: Tensor, context: Any, index: int) -> tuple[Step, Step]:
        """Return step sizes for the state ``z`` (B, N, d) at ``times[index]``: numbers, (d,) or (B, N, d)."""


class PlainStepSizes(StepSizes):
    """Two positive step sizes that do not depend on time, each a ``StepSize``."""

    def __init__(self, initial: float, channels: int | None = None) -> None:
        super().__init__()
        self.attention, self.feedforward = (StepSize(initial, channels) for _ in range(2))

    def prepare(self, x0: Tensor, times: Tensor) -> None:
        return None

    def forward(self, z: Tensor, context: Any, index: int) -> tuple[Step, Step]:
        return self.attention(), self.feedforward()


NORMED = ("normed", "twice-normed")
STEP_NETWORKS = ("paper", *NORMED, "raw", "sinusoids")


class ConditionedStepSizes(StepSizes):
    """``(alpha_t, gamma_t) = last(gelu(outer(embed(t) + inner(c))))``, one number per token and channel.

    The condition c is the state ``x_t`` or the input ``x0``; ``embed`` is a function of ``sinusoids(t)``.
    The network "paper" is that of the paper, with an RMS norm without gain; the norms of the others have
    trained gains, as in the official code:

    ================  ======================================  ==============  ============  ============
    network           embed, of the sinusoids of t            inner           outer         official for
    ================  ======================================  ==============  ============  ============
    ``paper``         Linear, GELU, Linear                    RMS norm        none          none
    ``normed``        Linear, RMS, GELU, RMS, Linear, RMS     RMS norm        none          images
    ``twice-normed``  Linear, RMS, GELU, RMS, Linear, RMS     RMS norm        RMS norm      images, small
    ``raw``           Linear, GELU, Linear                    none            none          Sudoku
    ``sinusoids``     none: ``time_dim`` is ``dim``           none            RMS norm      masked images
    ================  ======================================  ==============  ============  ============

    ``last`` is linear, initially with zero weights and the bias ``initial``. With ``initial=0``, as
    published, the untrained layer is the identity, and its projections have no gradient until the step
    sizes change. The official code also initialises ``embed`` with zero weights, which then never receive a
    gradient; here the weights are random. The step sizes may have either sign. Because ``embed`` is smooth,
    it can be evaluated at any t, including times beyond training.

    Args:
        dim: features d of a token.
        source: source of the condition, "state" or "input".
        time_dim: number of sinusoids, even, >= 4.
        initial: initial value of both step sizes.
        network: one of the names above.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, section 4.1, appendix and official
    code.
    """

    def __init__(
        self,
        dim: int,
        source: str = "state",
        *,
        time_dim: int = 512,
        initial: float = 0.0,
        network: str = "paper",
    ) -> None:
        super().__init__()
        self.source = require_choice("source", source, ("state", "input"))
        self.network = require_choice("step_network", network, STEP_NETWORKS)
        self.time_dim, dim = _check_time_dim(time_dim), require_count("dim", dim)
        self.initial = float(require_number("initial", initial))
        normed, outer = network in NORMED, network in ("twice-normed", "sinusoids")
        if network == "sinusoids":
            if time_dim != dim:
                wanted = f"time_dim must be dim={dim} for step_network='sinusoids'"
                raise ValueError(f"{wanted}, got {time_dim}")
            self.embedding = nn.Sequential()
        elif normed:
            self.embedding = nn.Sequential(
                nn.Linear(time_dim, dim), nn.RMSNorm(dim), nn.GELU(),
                nn.RMSNorm(dim), nn.Linear(dim, dim), nn.RMSNorm(dim),
            )  # fmt: skip
        else:
            self.embedding = nn.Sequential(nn.Linear(time_dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.last = nn.Linear(dim, 2 * dim)
        # Created after last, because optimisers store their state in the order of the parameters.
        self.inner: nn.Module = nn.RMSNorm(dim) if normed else nn.Identity()
        if network == "paper":
            self.inner = nn.RMSNorm(dim, eps=TINY_NORM, elementwise_affine=False)
        self.outer: nn.Module = nn.RMSNorm(dim) if outer else nn.Identity()
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, self.initial)

    def prepare(self, x0: Tensor, times: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ``embed(times)`` (T, d), and ``inner(x0)`` if the steps are conditioned on it."""
        waves = sinusoids(times, self.time_dim).to(self.last.weight.dtype)
        return self.embedding(waves), self.inner(x0) if self.source == "input" else None

    def forward(self, z: Tensor, context: Any, index: int) -> tuple[Tensor, Tensor]:
        embedded, condition = context
        condition = self.inner(z) if condition is None else condition
        alpha, gamma = self.last(F.gelu(self.outer(condition + embedded[index]))).chunk(2, dim=-1)
        return alpha, gamma

    def extra_repr(self) -> str:
        return f"network={self.network}, source={self.source}, initial={self.initial}"


def sinusoids(times: Tensor, count: int) -> Tensor:
    """Return sines and cosines of ``times`` (T,), periods ``2 pi`` to ``2 pi 10^4``, (T, count), float64."""
    half = _check_time_dim(count) // 2
    exponents = torch.arange(half, dtype=torch.float64, device=times.device) / (half - 1)
    angles = times.double().unsqueeze(-1) * LONGEST_PERIOD**-exponents
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def build_step_sizes(
    kind: str,
    dim: int,
    *,
    initial: float | None = None,
    time_dim: int = 512,
    network: str = "paper",
) -> StepSizes:
    """Build step sizes of a kind of ``STEP_SIZES``.

    ``initial=None`` means 0 if conditioned, else 0.1. ``network`` is a name of ``STEP_NETWORKS``.
    """
    require_choice("step_size", kind, STEP_SIZES)
    if kind.startswith("conditioned-"):
        source, start = kind.removeprefix("conditioned-"), 0.0 if initial is None else initial
        return ConditionedStepSizes(dim, source, time_dim=time_dim, initial=start, network=network)
    if require_choice("step_network", network, STEP_NETWORKS) != "paper":
        raise ValueError(f"step_network must be 'paper' for step_size={kind!r}, got {network!r}")
    start = 0.1 if initial is None else initial
    return PlainStepSizes(start, channels=dim if kind == "learned" else None)


def _check_time_dim(count: Any) -> int:
    if require_count("time_dim", count) % 2 or count < 4:
        raise ValueError(f"time_dim must be even and >= 4, got {count}")
    return count


class HyperSETLayer(nn.Module):
    r"""The layer that an unrolled Hyper-SET repeats for t = 1, 2, ... ::

        X_t+1/2 = X_t - alpha_t sum_h W_h (P + P^T) RMSNorm(W_h^T X_t)
        X_t+1   = X_t+1/2 + gamma_t D relu(RMSNorm(D^T X_t+1/2))

    Args:
        dim, heads, memories, feedforward, head_dim: see ``HyperSETEnergy``.
        attention: "bisoftmax", "sigmoid", "linear", "softmax" (rows only), or another of ``ATTENTIONS``.
        epsilon: epsilon of the norms, which have no gain. Their derivative is omitted, so a step is not the
            gradient of a function; use ``HyperSETEnergy`` for equilibrium layers.
        step_size: kind of ``alpha_t, gamma_t``: "conditioned-state" or "conditioned-input" per token and
            channel, from a network of time and of ``X_t`` or ``X_0`` (``ConditionedStepSizes``);
            "learned" for a positive number per channel; "fixed"; or ``StepSizes`` that layers share,
            which the owner registers (``step_network``, ``initial_step`` and ``time_dim`` are then
            ignored).
        step_network: network of conditioned step sizes; see ``ConditionedStepSizes``.
        initial_step: initial value of both; None for 0 with networks, as published, else 0.1.
        time_dim: number of sinusoids of the time.
        lora_rank: rank of differences ``scale A_t B_t`` of W and D between iterations; 0 for none.
        lora_scale: scale of the differences.
        iterations: number of differences.
        beta: inverse temperature of attention; None for ``1 / sqrt(p)``.
        gains: trained gains after the norms: "separate" for queries, keys and values, "shared" by them,
            or "none" (``NormGains``). With gains ``epsilon`` may be None, the machine epsilon.
        descent: rule that converts directions to steps: "plain", "momentum", "rmsprop",
            "rmsprop-momentum" or "adam" (``descend``). Except for "plain" a step depends on previous
            ones; ``forward`` treats it as the first.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, equations 9 and 11 and
    depth-wise LoRA; its official code for ``step_network``, ``gains`` and ``descent``.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        memories: int,
        *,
        step_size: str | StepSizes = "conditioned-state",
        step_network: str = "paper",
        initial_step: float | None = None,
        time_dim: int = 512,
        attention: str = "bisoftmax",
        feedforward: str = "relu",
        head_dim: int | None = None,
        epsilon: float | None = TINY_NORM,
        lora_rank: int = 0,
        lora_scale: float = 4.0,
        iterations: int = 12,
        beta: float | None = None,
        gains: str = "none",
        descent: str = "plain",
    ) -> None:
        super().__init__()
        self.descent = require_choice("descent", descent, DESCENTS)
        gained = require_choice("gains", gains, GAINS) != "none"
        norm = RMSNorm(TINY_NORM if gained and epsilon is None else epsilon)  # type: ignore[arg-type]
        self.attention = build_attention(
            attention, dim, heads, head_dim=head_dim, beta=beta, norm=norm
        )
        self.feedforward = build_feedforward(feedforward, dim, memories, norm=norm)
        self.step_sizes: StepSizes | None = None
        self._shared: tuple[StepSizes, ...] = ()  # modules in a tuple are not registered
        if isinstance(step_size, StepSizes):
            self._shared = (step_size,)
        else:
            self.step_sizes = build_step_sizes(
                step_size, dim, initial=initial_step, time_dim=time_dim, network=step_network
            )
        self.attention_deltas = self.feedforward_deltas = None
        rows = self.attention.weight.shape[0]
        if require_count("lora_rank", lora_rank, low=0):
            self.attention_deltas, self.feedforward_deltas = (
                LowRankDeltas(count, dim, lora_rank, iterations, scale=lora_scale)
                for count in (rows, memories)
            )
        self.gains = NormGains(gains, rows // heads, memories, epsilon=epsilon) if gained else None

    @property
    def is_plain(self) -> bool:
        """Whether the layer has no gains and no memory, so that a step follows the energies alone."""
        return self.gains is None and self.descent == "plain"

    @property
    def steps(self) -> StepSizes:
        """Step sizes of the layer, own or shared."""
        return self._shared[0] if self.step_sizes is None else self.step_sizes

    def context(self, x0: Tensor, times: Tensor) -> Any:
        """Return the context of all iterations from the input (B, N, d), 0 at masked tokens, and times (T,).

        It includes two initially empty dicts for the memory of the two steps.
        """
        return self.steps.prepare(x0, times), ({}, {})

    def advance(
        self, z: Tensor, context: Any, index: int, mask: Mask = None, *, deltas: int | None = None
    ) -> Tensor:
        """Return the state (B, N, d) after the iteration at ``times[index]``, ``index`` from 0.

        ``deltas`` is the index of the low-rank differences; None for ``index``.
        """
        prepared, (first, second) = context
        alpha, gamma = self.steps(z, prepared, index)
        coupling, memory = self._weights(index if deltas is None else deltas)
        z = move(z, self.direction(self.attention, z, mask, coupling, first), alpha)
        return move(z, self.direction(self.feedforward, z, mask, memory, second), gamma)

    def direction(
        self,
        energy: HeadsEnergy | MemoryEnergy,
        z: Tensor,
        mask: Mask,
        weight: Tensor | None,
        kept: dict[str, Any],
    ) -> Tensor:
        """Return the negative direction of a step, like ``z``; 0 at masked tokens."""
        if self.gains is None:
            gradient = energy.straight_gradient(z, mask=mask, weight=weight)
        else:
            gradient = self.gains.direction(energy, z, mask, weight)
        return descend(self.descent, kept, gradient)

    def forward(self, z: Tensor, x0: Tensor, t: int | float, *, mask: Mask = None) -> Tensor:
        """Return the state (B, N, d) after iteration ``t`` >= 1; ``x0`` (B, N, d) is the input."""
        if not t >= 1:
            raise ValueError(f"t must be >= 1, got {t!r}")
        context = self.context(hide(x0, mask), torch.tensor([t], device=z.device))
        moved = self.advance(hide(z, mask), context, 0, mask, deltas=int(t) - 1)
        return moved if mask is None else torch.where(mask.unsqueeze(-1), moved, z)

    def observe(self, z: Tensor, index: int, mask: Mask = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return both energies (B,) and features (B, heads, N, p) with the weights of ``index``.

        The norms have no gains here, even if those of the steps have.
        """
        coupling, memory = self._weights(index)
        features = self.attention.features(z, mask=mask, weight=coupling)
        recalled = self.feedforward.features(z, mask=mask, weight=memory)
        context = AttentionContext(mask=mask)
        value = self.attention.potential(features, context, True)[0]
        return value, self.feedforward.potential(recalled, context, True)[0], features

    def _weights(self, index: int) -> tuple[Tensor | None, Tensor | None]:
        """Return W and D of an iteration, or None for the energy's own."""
        if self.attention_deltas is None or self.feedforward_deltas is None:
            return None, None
        return (
            self.attention_deltas(self.attention.weight, index),
            self.feedforward_deltas(self.feedforward.weight, index),
        )


class LowRankDeltas(nn.Module):
    """``W_t = W + scale A_t B_t``, ``A_t`` (rows, rank) and ``B_t`` (rank, dim), for each iteration t.

    All entries are drawn from N(0, 0.02^2), so the iterations differ initially. Later iterations use the
    last difference.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, depth-wise LoRA.
    """

    def __init__(
        self, rows: int, dim: int, rank: int, iterations: int, *, scale: float = 4.0
    ) -> None:
        super().__init__()
        sizes = {"rows": rows, "dim": dim, "rank": rank, "iterations": iterations}
        for name, size in sizes.items():
            require_count(name, size)
        self.scale = float(require_number("scale", scale))
        self.left = nn.Parameter(0.02 * torch.randn(iterations, rows, rank))
        self.right = nn.Parameter(0.02 * torch.randn(iterations, rank, dim))

    def forward(self, weight: Tensor, index: int) -> Tensor:
        """Return ``W_t`` for the weight W (rows, dim) and t = ``index``, from 0."""
        index = min(index, len(self.left) - 1)
        return torch.addmm(weight, self.left[index], self.right[index], alpha=self.scale)

    def extra_repr(self) -> str:
        iterations, rows, rank = self.left.shape
        dim = self.right.shape[-1]
        return f"rows={rows}, dim={dim}, rank={rank}, iterations={iterations}, scale={self.scale}"


DESCENTS = ("plain", "momentum", "rmsprop", "rmsprop-momentum", "adam")
MOMENTUM, DECAY, FIRST, SECOND, EPSILON = 0.9, 0.8, 0.9, 0.96, 1e-6


def descend(kind: str, kept: dict[str, Any], gradient: Tensor) -> Tensor:
    """Convert the gradients g_1, g_2, ... of a solve to steps by an elementwise rule.

    ======================  =========================================================================
    ``"plain"``             ``g``
    ``"momentum"``          ``b``, where ``b <- MOMENTUM b + g``
    ``"rmsprop"``           ``g / (v^1/2 + EPSILON)``, where ``v <- DECAY v + (1 - DECAY) g^2``
    ``"rmsprop-momentum"``  ``b``, where ``b <- MOMENTUM b + g / (v^1/2 + EPSILON)``, v as above
    ``"adam"``              ``m' / (v'^1/2 + EPSILON)`` of the means m of g and v of g^2 with the
                            decays FIRST and SECOND, ``m' = m / (1 - FIRST^t)`` and likewise v'
    ======================  =========================================================================

    All rules except ``"plain"`` have a memory, ``kept``, which is empty at the start of a solve. A step is
    then not a function of the state, so there is no fixed point to solve for.

    Source: the experimental options of the official code of Hu, Zou, Xu, "Hyper-SET"
    (https://arxiv.org/abs/2502.11646), with its constants; Kingma and Ba, "Adam",
    https://arxiv.org/abs/1412.6980.
    """
    if kind == "plain":
        return gradient

    def add(name: str, decay: float, value: Tensor) -> Tensor:
        kept[name] = decay * kept[name] + value if name in kept else value
        return kept[name]

    def root(square: Tensor) -> Tensor:
        # The square root has no derivative at 0, the gradient of a masked token.
        return square.clamp_min(torch.finfo(square.dtype).tiny).sqrt() + EPSILON

    if kind == "momentum":
        return add("b", MOMENTUM, gradient)
    if kind == "adam":
        t = kept["t"] = kept.get("t", 0) + 1
        mean = add("m", FIRST, (1.0 - FIRST) * gradient)
        square = add("v", SECOND, (1.0 - SECOND) * gradient.square())
        return mean / (1.0 - FIRST**t) / root(square / (1.0 - SECOND**t))
    scaled = gradient / root(add("v", DECAY, (1.0 - DECAY) * gradient.square()))
    return scaled if kind == "rmsprop" else add("b", MOMENTUM, scaled)


GAINS = ("none", "shared", "separate")


class NormGains(nn.Module):
    r"""Directions of Hyper-SET's step with trained gains after the RMS norms ::

        attention:     sum_h W_h F(q, k, v),   q, k, v = g_q * u, g_k * u, g_v * u,   u = RMSNorm(W_h^T X)
        feed-forward:  -D phi(g * RMSNorm(D^T X))

    With ``beta`` the inverse temperature and ``S = beta Q K^T``, F is ``(softmax(S, rows) + softmax(S,
    columns)) V`` for bi-softmax attention, the first of the two for "softmax", ``w(S) V`` for attention
    with the weights w of a score, and ``phi'(Q) * beta phi(V) (phi(Q)^T phi(K))`` for linear attention
    with the feature map phi. For the ReLU energy the feed-forward phi is relu, and so on.

    Such a step descends no energy: the gains of queries, keys and values differ, and the derivative of the
    norm is omitted. The monitored energies are those without gains.

    Args:
        kind: "separate" for different gains of queries, keys and values, as in the official models of
            images; "shared" for one gain, as in those of Sudoku and masked images.
        width: features p of a head; all heads share the gains.
        memories: number of memories M.
        epsilon: epsilon of the norms; None for the machine epsilon of the dtype, as in the official code.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, its official code.
    """

    def __init__(
        self, kind: str, width: int, memories: int, *, epsilon: float | None = None
    ) -> None:
        super().__init__()
        self.kind = require_choice("gains", kind, GAINS[1:])
        self.query = nn.RMSNorm(width, eps=epsilon)
        separate = kind == "separate"
        self.key = nn.RMSNorm(width, eps=epsilon) if separate else None
        self.value = nn.RMSNorm(width, eps=epsilon) if separate else None
        self.memory = nn.RMSNorm(memories, eps=epsilon)

    def direction(
        self, energy: HeadsEnergy | MemoryEnergy, z: Tensor, mask: Mask, weight: Tensor | None
    ) -> Tensor:
        """Return the negative direction of a step, like ``z``; 0 at masked tokens."""
        weight = energy.weight if weight is None else weight
        raw = split_heads(F.linear(hide(z, mask), weight), energy.heads)
        if isinstance(energy, MemoryEnergy):
            gradient = -energy.activate(self.memory(raw), None, False)[1]
        else:
            query = self.query(raw)
            key = query if self.key is None else self.key(raw)
            value = query if self.value is None else self.value(raw)
            gradient = merge_heads(mix(energy, query, key, value, mask))
        return like_state(gradient @ weight, z, mask)


def mix(energy: HeadsEnergy, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """Return F of the formula above, (B, heads, N, p), for the attention of ``energy``."""
    beta = energy.beta
    assert not isinstance(beta, Tensor)  # Hyper-SET does not train temperatures
    if isinstance(energy, LinearAttention):
        phi = FEATURE_MAPS[energy.feature_map]
        mapped, keys, values = phi(query), phi(key).value, phi(value).value
        if mask is not None:  # phi(0) may be nonzero
            keys = keys.masked_fill(~mask[:, None, :, None], 0.0)
        return mapped.push(values @ (mapped.value.mT @ keys) * beta)
    if type(energy) is BiSoftmaxAttention and key is query and value is query:
        return bisoftmax(query, beta, mask=mask)[0]
    scores = beta * (query @ key.mT)
    if isinstance(energy, ScoreAttention):
        return SCORES[energy.score].weight(scores) @ value
    if mask is not None:  # the lowest finite number avoids NaN in empty rows
        pairs = mask[:, None, :, None] & mask[:, None, None, :]
        scores = scores.masked_fill(~pairs, torch.finfo(scores.dtype).min)
    if isinstance(energy, RowSoftmaxAttention):
        return scores.softmax(-1) @ value
    return (scores.softmax(-1) + scores.softmax(-2)) @ value


def refuse_memory(layers: Iterable[nn.Module]) -> None:
    """Raise ValueError if a layer's step depends on previous ones, so that it has no fixed point."""
    for layer in layers:
        if isinstance(layer, HyperSETLayer) and layer.descent != "plain":
            raise ValueError(
                f"descent must be 'plain' to solve for a fixed point of the step, got {layer.descent!r}"
            )

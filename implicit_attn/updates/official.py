"""What the official code of Hyper-SET does besides its paper: trained gains, other steps, other networks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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
from implicit_attn.energies.feedforward import MemoryEnergy
from implicit_attn.energies.projected import FEATURE_MAPS, Given, merge_heads, split_heads
from implicit_attn.energies.tokens import hide
from implicit_attn.kernels import bisoftmax
from implicit_attn.updates.gradient_step import move
from implicit_attn.updates.hyperset import (
    TINY_NORM,
    ConditionedStepSizes,
    HyperSETLayer,
    StepSizes,
    build_step_sizes,
)
from solvers.core.checks import require_choice, require_count

DESCENTS = ("plain", "momentum", "rmsprop", "rmsprop-momentum", "adam")


@dataclass(frozen=True)
class Descent:
    """The rule by which gradients g_1, g_2, ... of a solve become steps, entry by entry.

    ======================  =========================================================================
    ``"plain"``             ``g``
    ``"momentum"``          ``b``, where ``b <- momentum b + g``
    ``"rmsprop"``           ``g / (v^1/2 + epsilon)``, where ``v <- decay v + (1 - decay) g^2``
    ``"rmsprop-momentum"``  ``b``, where ``b <- momentum b + g / (v^1/2 + epsilon)``, v as above
    ``"adam"``              ``m' / (v'^1/2 + epsilon)`` of the means m of g and v of g^2 with the
                            decays ``first`` and ``second``, ``m' = m / (1 - first^t)`` likewise v'
    ======================  =========================================================================

    All but ``"plain"`` remember what came before, from zero at the beginning of a solve, so a step is
    no function of the state alone and has no fixed point to solve for.

    Args:
        kind: one of ``DESCENTS``.

    Source: the experimental options of the official code of Hu, Zou, Xu, "Hyper-SET"
    (https://arxiv.org/abs/2502.11646), with its numbers; Kingma and Ba, "Adam",
    https://arxiv.org/abs/1412.6980.
    """

    kind: str = "plain"
    momentum: float = 0.9
    decay: float = 0.8
    first: float = 0.9
    second: float = 0.96
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require_choice("descent", self.kind, DESCENTS)

    def __call__(self, kept: dict[str, Any], gradient: Tensor) -> Tensor:
        """The step for ``gradient``, like it; ``kept``, empty before the first, remembers the others."""
        if self.kind == "plain":
            return gradient
        t = kept["t"] = kept.get("t", 0) + 1

        def add(name: str, decay: float, value: Tensor) -> Tensor:
            kept[name] = decay * kept[name] + value if name in kept else value
            return kept[name]

        if self.kind == "momentum":
            return add("b", self.momentum, gradient)
        if self.kind == "adam":
            mean = add("m", self.first, (1.0 - self.first) * gradient)
            square = add("v", self.second, (1.0 - self.second) * gradient.square())
            return mean / (1.0 - self.first**t) / self._root(square / (1.0 - self.second**t))
        square = add("v", self.decay, (1.0 - self.decay) * gradient.square())
        scaled = gradient / self._root(square)
        return scaled if self.kind == "rmsprop" else add("b", self.momentum, scaled)

    def _root(self, square: Tensor) -> Tensor:
        # The root of 0 has no derivative, and a masked token's gradient is 0.
        least = torch.finfo(square.dtype).tiny
        return square.clamp_min(least).sqrt() + self.epsilon


GAINS = ("none", "shared", "separate")


class NormGains(nn.Module):
    r"""The two directions of Hyper-SET's step with trained gains after the RMS norms ::

        attention:     sum_h W_h F(q, k, v),   q, k, v = g_q * u, g_k * u, g_v * u,   u = RMSNorm(W_h^T X)
        feed-forward:  -D phi(g * RMSNorm(D^T X))

    With ``beta`` the inverse temperature and ``S = beta Q K^T``, F is ``(softmax(S, rows) + softmax(S,
    columns)) V`` for bi-softmax attention, the first of the two for "softmax", ``w(S) V`` for attention
    with the weights w of a score, and ``phi'(Q) * beta phi(V) (phi(Q)^T phi(K))`` for linear attention
    with the feature map phi. For the ReLU energy the feed-forward phi is relu, and so on.

    A step along such directions descends nothing: the gains of queries, keys and values differ, and the
    derivative of the norm is dropped. The energies that are monitored are those without gains.

    Args:
        kind: "separate": gains of queries, keys and values of their own, as the official models of
            images have; "shared": one for all three, as those of Sudoku and masked images.
        width: features p of a head; the gains of all heads are the same.
        memories: M.
        epsilon: of the norms; None: the machine epsilon of the dtype, as official.

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

    def attention_direction(
        self, energy: HeadsEnergy, z: Tensor, mask: Tensor | None, weight: Tensor | None
    ) -> Tensor:
        """The direction whose negative attention takes, like ``z``; 0 at masked tokens."""
        weight = energy.weight if weight is None else weight
        raw = split_heads(F.linear(hide(z, mask), weight), energy.heads)
        query = self.query(raw)
        key = query if self.key is None else self.key(raw)
        value = query if self.value is None else self.value(raw)
        force = mix(energy, query, key, value, mask)
        return hide(merge_heads(force) @ weight, mask).to(z.dtype)

    def feedforward_direction(
        self, energy: MemoryEnergy, z: Tensor, mask: Tensor | None, weight: Tensor | None
    ) -> Tensor:
        """The direction whose negative the feed-forward part takes, like ``z``."""
        weight = energy.weight if weight is None else weight
        force = energy.force(self.memory(F.linear(hide(z, mask), weight)), Given(mask))
        return hide(force @ weight, mask).to(z.dtype)


def mix(
    energy: HeadsEnergy, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """F of the formula above, (B, heads, N, p), for the kind of attention that ``energy`` has."""
    beta = energy.beta
    assert not isinstance(beta, Tensor)  # Hyper-SET trains no temperatures
    if isinstance(energy, RowSoftmaxAttention):
        return _masked_scores(beta, query, key, mask).softmax(-1) @ value
    if isinstance(energy, BiSoftmaxAttention):
        if key is query and value is query:
            return bisoftmax(query, beta, mask=mask)[0]
        scores = _masked_scores(beta, query, key, mask)
        return (scores.softmax(-1) + scores.softmax(-2)) @ value
    if isinstance(energy, LinearAttention):
        return _linear(energy, query, key, value, mask)
    assert isinstance(energy, ScoreAttention)
    return SCORES[energy.score].weight(beta * (query @ key.mT)) @ value


def _masked_scores(beta: float, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Scores, the least number where a token is masked: finite, so that empty rows are no NaN."""
    scores = beta * (query @ key.mT)
    if mask is None:
        return scores
    pairs = mask[:, None, :, None] & mask[:, None, None, :]
    return scores.masked_fill(~pairs, torch.finfo(scores.dtype).min)


def _linear(
    energy: LinearAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    phi = FEATURE_MAPS[energy.feature_map]
    mapped, keys, values = phi(query), phi(key).value, phi(value).value
    if mask is not None:  # phi(0) may be another number than 0
        keys = keys.masked_fill(~mask[:, None, :, None], 0.0)
    return mapped.push(values @ (mapped.value.mT @ keys) * energy.beta)


STEP_NETWORKS = ("paper", "normed", "twice-normed", "raw", "sinusoids")


class OfficialStepSizes(ConditionedStepSizes):
    """``(alpha_t, gamma_t) = last(gelu(outer(embed(t) + inner(c))))``, one number per token and channel.

    As ``ConditionedStepSizes``, whose network "paper" is the one that the paper draws; here norms with
    trained gains stand where the official code has them:

    ================  ======================================  ==============  ============  ============
    network           embed, of the sinusoids of t            inner           outer         official for
    ================  ======================================  ==============  ============  ============
    ``normed``        Linear, RMS, GELU, RMS, Linear, RMS     RMS norm        none          images
    ``twice-normed``  Linear, RMS, GELU, RMS, Linear, RMS     RMS norm        RMS norm      images, small
    ``raw``           Linear, GELU, Linear                    none            none          Sudoku
    ``sinusoids``     none: ``time_dim`` is ``dim``           none            RMS norm      masked images
    ================  ======================================  ==============  ============  ============

    The official code starts ``embed`` with weights 0, as well as ``last``, so that no gradient ever reaches
    the weights of ``embed``. Here it starts at random.

    Args:
        dim: d.
        network: one of the names above.
        source, time_dim, initial: as for ``ConditionedStepSizes``.

    Source: the official code of Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646.
    """

    def __init__(
        self,
        dim: int,
        network: str,
        source: str = "state",
        *,
        time_dim: int = 512,
        initial: float = 0.0,
    ) -> None:
        super().__init__(dim, source, time_dim=time_dim, initial=initial)
        self.network = require_choice("step_network", network, STEP_NETWORKS[1:])
        normed = network in ("normed", "twice-normed")
        if normed:
            self.embedding = nn.Sequential(
                nn.Linear(time_dim, dim), nn.RMSNorm(dim), nn.GELU(),
                nn.RMSNorm(dim), nn.Linear(dim, dim), nn.RMSNorm(dim),
            )  # fmt: skip
        elif network == "sinusoids":
            if time_dim != require_count("dim", dim):
                raise ValueError(
                    f"time_dim must be dim={dim} for step_network='sinusoids', got {time_dim}"
                )
            self.embedding = nn.Sequential()
        outer = network in ("twice-normed", "sinusoids")
        self.inner = nn.RMSNorm(dim) if normed else nn.Identity()
        self.outer = nn.RMSNorm(dim) if outer else nn.Identity()

    def extra_repr(self) -> str:
        return f"network={self.network}, {super().extra_repr()}"


def build_step_network(
    network: str, kind: str, dim: int, *, initial: float | None = None, time_dim: int = 512
) -> StepSizes:
    """The step sizes of a kind of ``STEP_SIZES``, by a network of ``STEP_NETWORKS`` if conditioned."""
    require_choice("step_network", network, STEP_NETWORKS)
    if network == "paper":
        return build_step_sizes(kind, dim, initial=initial, time_dim=time_dim)
    source = kind.removeprefix("conditioned-")
    if source not in ("state", "input"):
        raise ValueError(
            f"step_network must be 'paper' where step_size={kind!r} has no network, got {network!r}"
        )
    start = 0.0 if initial is None else initial
    return OfficialStepSizes(dim, network, source, time_dim=time_dim, initial=start)


class OfficialHyperSETLayer(HyperSETLayer):
    """The layer of Hyper-SET with what the official code has besides the paper.

    Args:
        dim, heads, memories, options: as for ``HyperSETLayer``.
        gains: trained gains after the norms: "separate" for queries, keys and values, "shared" by them,
            or "none" (``NormGains``). With gains the step follows the gradient of no energy, not even
            one with fixed norms, and ``epsilon`` may be None, the machine epsilon.
        step_network: of conditioned step sizes: "paper", or "normed", "twice-normed", "raw" or
            "sinusoids" (``OfficialStepSizes``).
        descent: what becomes of the directions: "plain", "momentum", "rmsprop",
            "rmsprop-momentum" or "adam" (``Descent``). But for "plain" a step depends on those before
            it; ``forward`` takes it as the first.

    Source: the official code of Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        memories: int,
        *,
        gains: str = "none",
        step_network: str = "paper",
        descent: str = "plain",
        step_size: str | StepSizes = "conditioned-state",
        initial_step: float | None = None,
        time_dim: int = 512,
        epsilon: float | None = TINY_NORM,
        **options: Any,
    ) -> None:
        gained = require_choice("gains", gains, GAINS) != "none"
        own = isinstance(step_size, str)
        if isinstance(step_size, str):
            step_size = build_step_network(
                step_network, step_size, dim, initial=initial_step, time_dim=time_dim
            )
        norm: Any = TINY_NORM if gained and epsilon is None else epsilon
        super().__init__(dim, heads, memories, step_size=step_size, epsilon=norm, **options)
        if own:
            self.step_sizes, self._shared = step_size, ()
        self.descent = Descent(descent)
        width = self.attention.weight.shape[0] // heads
        self.gains = NormGains(gains, width, memories, epsilon=epsilon) if gained else None

    @property
    def is_plain(self) -> bool:  # type: ignore[override]
        """No gains, nothing remembered."""
        return self.gains is None and self.descent.kind == "plain"

    def context(self, x0: Tensor, times: Tensor) -> Any:
        return super().context(x0, times), ({}, {})

    def advance(
        self,
        z: Tensor,
        context: Any,
        index: int,
        mask: Tensor | None = None,
        *,
        deltas: int | None = None,
    ) -> Tensor:
        prepared, moments = context
        alpha, gamma = self.steps(z, prepared, index)
        coupling, memory = self._weights(index if deltas is None else deltas)
        direction = self.attention_direction(z, mask, coupling)
        z = move(z, self.descent(moments[0], direction), alpha)
        direction = self.feedforward_direction(z, mask, memory)
        return move(z, self.descent(moments[1], direction), gamma)

    def attention_direction(self, z: Tensor, mask: Tensor | None, weight: Tensor | None) -> Tensor:
        if self.gains is None:
            return super().attention_direction(z, mask, weight)
        return self.gains.attention_direction(self.attention, z, mask, weight)

    def feedforward_direction(
        self, z: Tensor, mask: Tensor | None, weight: Tensor | None
    ) -> Tensor:
        if self.gains is None:
            return super().feedforward_direction(z, mask, weight)
        return self.gains.feedforward_direction(self.feedforward, z, mask, weight)


def refuse_memory(layers: Iterable[nn.Module]) -> None:
    """Raise a ValueError where a layer's step depends on those before it: it has no fixed point."""
    for layer in layers:
        if isinstance(layer, OfficialHyperSETLayer) and layer.descent.kind != "plain":
            raise ValueError(
                "descent must be 'plain' where a fixed point of the layer's step is wanted, got "
                f"{layer.descent.kind!r}"
            )

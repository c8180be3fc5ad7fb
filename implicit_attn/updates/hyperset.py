"""Hyper-SET: the layer that it repeats, its step sizes, low-rank differences of its weights."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.hyperset import build_attention, build_feedforward
from implicit_attn.energies.projected import Given, RMSNorm
from implicit_attn.energies.tokens import hide
from implicit_attn.updates.gradient_step import move
from solvers.core.checks import require_choice, require_count, require_number, require_positive

TINY_NORM = 1e-6
STEP_SIZES = ("conditioned-state", "conditioned-input", "learned", "fixed")
LONGEST_PERIOD = 10_000.0

Step = float | Tensor


class StepSize(nn.Module):
    """A positive step size: a number, or a learned one for each channel, ``log(1 + exp(raw))``, (d,)."""

    def __init__(self, initial: float, channels: int | None = None) -> None:
        super().__init__()
        self.initial, self.raw = float(require_positive("step_size", initial)), None
        if channels is not None:
            raw = initial + math.log(-math.expm1(-initial))
            self.raw = nn.Parameter(torch.full((channels,), raw))

    def forward(self) -> float | Tensor:
        return self.initial if self.raw is None else F.softplus(self.raw)

    def extra_repr(self) -> str:
        return f"initial={self.initial}"


class StepSizes(nn.Module):
    """Two step sizes for each iteration: of the attention step and of the feed-forward step."""

    @abstractmethod
    def prepare(self, x0: Tensor, times: Tensor) -> Any:
        """The context of ``forward``, computed once from the input (B, N, d) and the times (T,)."""

    @abstractmethod
    def forward(self, z: Tensor, context: Any, index: int) -> tuple[Step, Step]:
        """Step sizes for the state ``z`` (B, N, d) at ``times[index]``: numbers, (d,) or (B, N, d)."""


class PlainStepSizes(StepSizes):
    """The same two positive step sizes at all times, each a ``StepSize`` of these arguments."""

    def __init__(self, initial: float, channels: int | None = None) -> None:
        super().__init__()
        self.attention, self.feedforward = (StepSize(initial, channels) for _ in range(2))

    def prepare(self, x0: Tensor, times: Tensor) -> None:
        return None

    def forward(self, z: Tensor, context: Any, index: int) -> tuple[Step, Step]:
        return self.attention(), self.feedforward()


class ConditionedStepSizes(StepSizes):
    """``(alpha_t, gamma_t) = last(gelu(embed(t) + norm(c)))``, one number per token and channel.

    ``embed(t)`` is Linear - GELU - Linear of ``sinusoids(t)``, ``norm`` the RMS norm without gain, and
    the condition c the state ``x_t`` or the input ``x0``. ``last`` is linear, with zero weights and the
    bias ``initial`` before training. With ``initial`` 0, as published, the untrained layer is the
    identity, and its projections have no gradient until the step sizes have changed. The step sizes may
    take either sign. Since ``embed`` is smooth, any t can be evaluated, also beyond the trained ones.

    Args:
        dim: d.
        source: of the condition, "state" or "input".
        time_dim: number of sinusoids, even, >= 4.
        initial: initial value of both step sizes.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, section 4.1 and appendix.
    """

    def __init__(
        self, dim: int, source: str = "state", *, time_dim: int = 512, initial: float = 0.0
    ) -> None:
        super().__init__()
        require_choice("source", source, ("state", "input"))
        self.source, self.time_dim = source, _check_time_dim(time_dim)
        self.initial = float(require_number("initial", initial))
        self.embedding = nn.Sequential(
            nn.Linear(time_dim, require_count("dim", dim)), nn.GELU(), nn.Linear(dim, dim)
        )
        self.last = nn.Linear(dim, 2 * dim)
        # after last: optimisers store their state by the order of the parameters
        self.inner: nn.Module = nn.RMSNorm(dim, eps=TINY_NORM, elementwise_affine=False)
        self.outer: nn.Module = nn.Identity()
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, self.initial)

    def prepare(self, x0: Tensor, times: Tensor) -> tuple[Tensor, Tensor | None]:
        """``embed(times)`` (T, d), and ``norm(x0)`` where the steps are conditioned on it."""
        waves = sinusoids(times, self.time_dim).to(self.last.weight.dtype)
        return self.embedding(waves), self.inner(x0) if self.source == "input" else None

    def forward(self, z: Tensor, context: Any, index: int) -> tuple[Tensor, Tensor]:
        embedded, condition = context
        condition = self.inner(z) if condition is None else condition
        alpha, gamma = self.last(F.gelu(self.outer(condition + embedded[index]))).chunk(2, dim=-1)
        return alpha, gamma

    def extra_repr(self) -> str:
        return f"source={self.source}, initial={self.initial}"


def sinusoids(times: Tensor, count: int) -> Tensor:
    """Sines and cosines of ``times`` (T,), periods ``2 pi`` to ``2 pi 10^4``: (T, count), float64."""
    half = _check_time_dim(count) // 2
    exponents = torch.arange(half, dtype=torch.float64, device=times.device) / (half - 1)
    angles = times.double().unsqueeze(-1) * LONGEST_PERIOD**-exponents
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def build_step_sizes(
    kind: str, dim: int, *, initial: float | None = None, time_dim: int = 512
) -> StepSizes:
    """The step sizes of a kind of ``STEP_SIZES``; ``initial`` None: 0 if conditioned, else 0.1."""
    require_choice("step_size", kind, STEP_SIZES)
    if kind.startswith("conditioned-"):
        start = 0.0 if initial is None else initial
        source = kind.removeprefix("conditioned-")
        return ConditionedStepSizes(dim, source, time_dim=time_dim, initial=start)
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
        dim, heads, memories, feedforward, head_dim: as for ``HyperSETEnergy``.
        attention: "bisoftmax", "sigmoid", "linear", "softmax" (rows only), or another of ``ATTENTIONS``.
        epsilon: of the norms, which have no gain. Their derivative is dropped, so that a step follows the
            gradient of no function; ``HyperSETEnergy`` is the energy for equilibrium layers.
        step_size: where ``alpha_t, gamma_t`` come from. "conditioned-state", "conditioned-input":
            per token and channel from a network of time and of ``X_t`` or ``X_0``
            (``ConditionedStepSizes``); "learned": a positive number per channel; "fixed". Or
            ``StepSizes`` that layers share: their owner registers them, and ``initial_step`` and
            ``time_dim`` are not used.
        initial_step: initial value of both; None: 0 for the networks, as published, else 0.1.
        time_dim: number of sinusoids of the time.
        lora_rank: rank of differences ``scale A_t B_t`` of W and D between iterations; 0: none.
        lora_scale: scale.
        iterations: number of such differences.
        beta: inverse temperature of attention; None: ``1 / sqrt(p)``.

    What the official code has besides: ``implicit_attn.updates.official.OfficialHyperSETLayer``.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, equations 9 and 11 and
    depth-wise LoRA.
    """

    is_plain = True  # a step follows the energies' own directions, and nothing else

    def __init__(
        self,
        dim: int,
        heads: int,
        memories: int,
        *,
        step_size: str | StepSizes = "conditioned-state",
        initial_step: float | None = None,
        time_dim: int = 512,
        attention: str = "bisoftmax",
        feedforward: str = "relu",
        head_dim: int | None = None,
        epsilon: float = TINY_NORM,
        lora_rank: int = 0,
        lora_scale: float = 4.0,
        iterations: int = 12,
        beta: float | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"head_dim": head_dim, "beta": beta, "norm": RMSNorm(epsilon)}
        self.attention = build_attention(attention, dim, heads, **options)
        self.feedforward = build_feedforward(feedforward, dim, memories, norm=RMSNorm(epsilon))
        self.step_sizes: StepSizes | None = None
        self._shared: tuple[StepSizes, ...] = ()  # a tuple's modules are not registered
        if isinstance(step_size, StepSizes):
            self._shared = (step_size,)
        else:
            self.step_sizes = build_step_sizes(
                step_size, dim, initial=initial_step, time_dim=time_dim
            )
        self.attention_deltas = self.feedforward_deltas = None
        if require_count("lora_rank", lora_rank, low=0):
            rows = self.attention.weight.shape[0]
            rest: Any = (dim, lora_rank, iterations)
            self.attention_deltas = LowRankDeltas(rows, *rest, scale=lora_scale)
            self.feedforward_deltas = LowRankDeltas(memories, *rest, scale=lora_scale)

    @property
    def steps(self) -> StepSizes:
        """The step sizes, the layer's own or shared ones."""
        return self._shared[0] if self.step_sizes is None else self.step_sizes

    def context(self, x0: Tensor, times: Tensor) -> Any:
        """What all iterations share: of the input (B, N, d), 0 at masked tokens, and times (T,)."""
        return self.steps.prepare(x0, times)

    def advance(
        self,
        z: Tensor,
        context: Any,
        index: int,
        mask: Tensor | None = None,
        *,
        deltas: int | None = None,
    ) -> Tensor:
        """The state (B, N, d) after the iteration at ``times[index]``, index counted from 0.

        ``deltas``: the number of the low-rank differences; None: ``index``.
        """
        alpha, gamma = self.steps(z, context, index)
        coupling, memory = self._weights(index if deltas is None else deltas)
        z = move(z, self.attention_direction(z, mask, coupling), alpha)
        return move(z, self.feedforward_direction(z, mask, memory), gamma)

    def attention_direction(self, z: Tensor, mask: Tensor | None, weight: Tensor | None) -> Tensor:
        """The direction whose negative attention takes, like ``z``; 0 at masked tokens."""
        return self.attention.straight_gradient(z, mask=mask, weight=weight)

    def feedforward_direction(
        self, z: Tensor, mask: Tensor | None, weight: Tensor | None
    ) -> Tensor:
        """The direction whose negative the feed-forward part takes, like ``z``."""
        return self.feedforward.straight_gradient(z, mask=mask, weight=weight)

    def forward(
        self, z: Tensor, x0: Tensor, t: int | float, *, mask: Tensor | None = None
    ) -> Tensor:
        """The state (B, N, d) after iteration ``t``, counted from 1; ``x0`` (B, N, d) the input."""
        if not t >= 1:
            raise ValueError(f"t must be >= 1, got {t!r}")
        context = self.context(hide(x0, mask), torch.tensor([t], device=z.device))
        moved = self.advance(hide(z, mask), context, 0, mask, deltas=int(t) - 1)
        return moved if mask is None else torch.where(mask.unsqueeze(-1), moved, z)

    def observe(
        self, z: Tensor, index: int, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Both energies (B,) and features (B, heads, N, p), with the weights of ``index``.

        They are those of the norms without gains, also where the steps have gains.
        """
        coupling, memory = self._weights(index)
        features = self.attention.features(z, mask=mask, weight=coupling)
        recalled = self.feedforward.features(z, mask=mask, weight=memory)
        value = self.attention.potential(features, Given(mask))
        return value, self.feedforward.potential(recalled, Given(mask)), features

    def _weights(self, index: int) -> tuple[Tensor | None, Tensor | None]:
        """W and D of an iteration; None: the energy's own."""
        if self.attention_deltas is None or self.feedforward_deltas is None:
            return None, None
        return (
            self.attention_deltas(self.attention.weight, index),
            self.feedforward_deltas(self.feedforward.weight, index),
        )


class LowRankDeltas(nn.Module):
    """``W_t = W + scale A_t B_t``, ``A_t`` (rows, rank) and ``B_t`` (rank, dim), for each iteration t.

    All entries are drawn from N(0, 0.02^2), so the iterations differ from the start. Iterations
    beyond the last delta use the last.

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
        """``W_t`` for the weight W (rows, dim) and t = ``index``, counted from 0."""
        index = min(index, len(self.left) - 1)
        return torch.addmm(weight, self.left[index], self.right[index], alpha=self.scale)

    def extra_repr(self) -> str:
        iterations, rows, rank = self.left.shape
        dim = self.right.shape[-1]
        return f"rows={rows}, dim={dim}, rank={rank}, iterations={iterations}, scale={self.scale}"

"""The step of the hyperspherical energy transformer (Hyper-SET): autonomous, and with time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.energies.checks import check_input
from implicit_attn.energies.hyperset_energy import build_attention, build_feedforward
from implicit_attn.energies.projected import ProjectedEnergy, RMSNorm
from implicit_attn.energies.tokens import hide
from implicit_attn.updates.gradient_step import StepSize
from implicit_attn.updates.official.descent import Descent, Moments
from implicit_attn.updates.official.gains import GAINS, NormGains
from implicit_attn.updates.official.networks import build_step_network
from implicit_attn.updates.step_sizes import Step, StepSizes
from implicit_attn.updates.update import Update
from solvers.core.checks import require_choice, require_count, require_instance, require_positive

TINY_NORM = 1e-6


class HyperSETStep(Update):
    r"""One iteration of Hyper-SET with constant steps ::

        X <- X - alpha sum_h W_h (P + P^T) Y_h,   Y_h = RMSNorm(W_h^T X),  P = softmax(beta Y_h Y_h^T)
        X <- X + gamma D relu(RMSNorm(D^T X))

    after ``X <- X + injection (x - X)`` where ``injection > 0``; else the input is only the initial
    state. The norms have no gain and a tiny epsilon. Their derivative is dropped, so this is the
    gradient step of no function of X, and its Jacobian is not symmetric. ``HyperSETEnergy`` is the
    energy for equilibrium layers.

    Args:
        dim, heads, memories, feedforward, head_dim, bound: as for ``HyperSETEnergy``.
        step_size: alpha = gamma, > 0, or the pair (alpha, gamma).
        injection: fraction of the step towards the input, 0 <= injection <= 1.
        attention: "bisoftmax", "sigmoid", "linear" or "softmax" (rows only).
        epsilon: of the norms.

    Shapes: ``z`` and ``x`` (B, N, d), ``mask`` (B, N) bool; masked tokens keep their state.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, equations 9 and 11.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        memories: int,
        *,
        step_size: float | tuple[float, float] = 0.1,
        injection: float = 0.0,
        attention: str = "bisoftmax",
        feedforward: str = "relu",
        head_dim: int | None = None,
        epsilon: float = TINY_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        alpha, gamma = step_size if isinstance(step_size, tuple) else (step_size, step_size)
        if isinstance(injection, bool) or not 0.0 <= injection <= 1.0:
            raise ValueError(f"injection must be a number from 0 to 1, got {injection!r}")
        options: dict[str, Any] = {"norm": RMSNorm(epsilon), "bound": bound}
        self.attention = build_attention(attention, dim, heads, head_dim=head_dim, **options)
        self.feedforward = build_feedforward(feedforward, dim, memories, **options)
        self.attention_step, self.feedforward_step = StepSize(alpha), StepSize(gamma)
        self.injection = float(injection)

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        if self.injection and x is not None:
            pull = hide(check_input(x, z, type(self).__name__) - z, mask)
            z = torch.add(z, pull, alpha=self.injection)
        z = descend(z, self.attention, self.attention_step(), mask, None)
        return descend(z, self.feedforward, self.feedforward_step(), mask, None)


class HyperSETLayer(nn.Module):
    r"""The layer that an unrolled Hyper-SET repeats for t = 1, 2, ... ::

        X_t+1/2 = X_t - alpha_t sum_h W_h (P + P^T) RMSNorm(W_h^T X_t)
        X_t+1   = X_t+1/2 + gamma_t D relu(RMSNorm(D^T X_t+1/2))

    Args:
        dim, heads, memories, attention, feedforward, head_dim, epsilon: as for ``HyperSETStep``.
        step_size: where ``alpha_t, gamma_t`` come from. "conditioned-state", "conditioned-input":
            per token and channel from a network of time and of ``X_t`` or ``X_0``
            (``ConditionedStepSizes``); "learned": a positive number per channel; "fixed".
        initial_step: initial value of both; None: 0 for the networks, as published, else 0.1.
        time_dim: number of sinusoids of the time.
        lora_rank: rank of differences ``scale A_t B_t`` of W and D between iterations; 0: none.
        lora_scale: scale.
        iterations: number of such differences.
        beta: inverse temperature of attention; None: ``1 / sqrt(p)``.
        gains: trained gains after the norms, as in the official code: "separate" for queries, keys
            and values, "shared" by them, or "none" (``NormGains``). With gains the step follows the
            gradient of no energy, not even one with fixed norms, and ``epsilon`` may be None, the
            machine epsilon.
        step_network: of conditioned step sizes: "paper", or "normed", "twice-normed", "raw" or
            "sinusoids" from the official code (``OfficialStepSizes``).
        descent: what becomes of the directions: "plain", "momentum", "rmsprop",
            "rmsprop-momentum" or "adam" (``Descent``). But for "plain" a step depends on those before
            it; ``forward`` takes it as the first.
        steps: step sizes that layers share; ``step_size``, ``initial_step``, ``time_dim`` and
            ``step_network`` are then not used, and their weights not this layer's.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, equations 9 and 11 and
    depth-wise LoRA; gains, networks and descents: its official code.
    """

    step_sizes: StepSizes

    def __init__(
        self,
        dim: int,
        heads: int,
        memories: int,
        *,
        step_size: str = "conditioned-state",
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
        step_network: str = "paper",
        descent: str = "plain",
        steps: StepSizes | None = None,
    ) -> None:
        super().__init__()
        gained = require_choice("gains", gains, GAINS) != "none"
        norm = RMSNorm(TINY_NORM if gained and epsilon is None else epsilon)  # type: ignore[arg-type]
        options: dict[str, Any] = {"head_dim": head_dim, "beta": beta, "norm": norm}
        self.attention = build_attention(attention, dim, heads, **options)
        self.feedforward = build_feedforward(feedforward, dim, memories, norm=norm)
        self.descent = Descent(descent)
        if steps is None:
            begin: dict[str, Any] = {"initial": initial_step, "time_dim": time_dim}
            self.step_sizes = build_step_network(step_network, step_size, dim, **begin)
        else:
            # The owner registers them: a weight must not appear twice in the state of a model.
            self.__dict__["step_sizes"] = require_instance("steps", steps, StepSizes, "StepSizes")
        width = self.attention.weight.shape[0] // heads
        self.gains = NormGains(gains, width, memories, epsilon=epsilon) if gained else None
        self.attention_deltas = self.feedforward_deltas = None
        if isinstance(lora_rank, bool) or not isinstance(lora_rank, int) or lora_rank < 0:
            raise ValueError(f"lora_rank must be an integer >= 0, got {lora_rank!r}")
        if lora_rank:
            rows = self.attention.weight.shape[0]
            rest: Any = (dim, lora_rank, iterations)
            self.attention_deltas = LowRankDeltas(rows, *rest, scale=lora_scale)
            self.feedforward_deltas = LowRankDeltas(memories, *rest, scale=lora_scale)

    @property
    def is_plain(self) -> bool:
        """Whether a step follows the energies' own directions: no gains, nothing remembered."""
        return self.gains is None and self.descent.kind == "plain"

    def context(self, x0: Tensor, times: Tensor) -> Any:
        """What all iterations share: of the input (B, N, d), 0 at masked tokens, and times (T,)."""
        moments = (self.descent.start(), self.descent.start())
        return self.step_sizes.prepare(x0, times), moments

    def advance(self, z: Tensor, context: Any, index: int, mask: Tensor | None = None) -> Tensor:
        """The state (B, N, d) after the iteration at ``times[index]``, index counted from 0."""
        prepared, moments = context
        return self._step(z, self.step_sizes(z, prepared, index), moments, index, mask)

    def forward(
        self, z: Tensor, x0: Tensor, t: int | float, *, mask: Tensor | None = None
    ) -> Tensor:
        """The state (B, N, d) after iteration ``t``, counted from 1; ``x0`` (B, N, d) the input."""
        if not t >= 1:
            raise ValueError(f"t must be >= 1, got {t!r}")
        visible = hide(z, mask)
        context, moments = self.context(hide(x0, mask), torch.tensor([t], device=z.device))
        moved = self._step(visible, self.step_sizes(visible, context, 0), moments, int(t) - 1, mask)
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
        value = self.attention.potential(features, mask)
        return value, self.feedforward.potential(recalled, mask), features

    def _step(
        self,
        z: Tensor,
        steps: tuple[Step, Step],
        moments: tuple[Moments, Moments],
        index: int,
        mask: Tensor | None,
    ) -> Tensor:
        coupling, memory = self._weights(index)
        if self.gains is None:
            first = self.attention.straight_gradient(z, mask=mask, weight=coupling)
        else:
            first = self.gains.attention_direction(self.attention, z, mask, coupling)
        z = move(z, self.descent(moments[0], first), steps[0])
        if self.gains is None:
            second = self.feedforward.straight_gradient(z, mask=mask, weight=memory)
        else:
            second = self.gains.feedforward_direction(self.feedforward, z, mask, memory)
        return move(z, self.descent(moments[1], second), steps[1])

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

    All entries are drawn from N(0, deviation^2), so the iterations differ from the start. Iterations
    beyond the last delta use the last.

    Args:
        rows, dim: shape of the weight W.
        rank: of the differences.
        iterations: number of differences.
        scale: their factor.
        deviation: standard deviation of the initial entries.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, depth-wise LoRA.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        rank: int,
        iterations: int,
        *,
        scale: float = 4.0,
        deviation: float = 0.02,
    ) -> None:
        super().__init__()
        sizes = {"rows": rows, "dim": dim, "rank": rank, "iterations": iterations}
        for name, size in sizes.items():
            require_count(name, size)
        if isinstance(scale, bool) or not math.isfinite(scale):
            raise ValueError(f"scale must be a finite number, got {scale!r}")
        deviation = require_positive("deviation", deviation)
        self.scale = float(scale)
        self.left = nn.Parameter(deviation * torch.randn(iterations, rows, rank))
        self.right = nn.Parameter(deviation * torch.randn(iterations, rank, dim))

    def forward(self, weight: Tensor, index: int) -> Tensor:
        """``W_t`` for the weight W (rows, dim) and t = ``index``, counted from 0."""
        index = min(index, len(self.left) - 1)
        return torch.addmm(weight, self.left[index], self.right[index], alpha=self.scale)

    def extra_repr(self) -> str:
        iterations, rows, rank = self.left.shape
        dim = self.right.shape[-1]
        return f"rows={rows}, dim={dim}, rank={rank}, iterations={iterations}, scale={self.scale}"


def refuse_memory(layers: Iterable[nn.Module]) -> None:
    """Raise a ValueError where a layer's step depends on those before it: it has no fixed point."""
    for layer in layers:
        if isinstance(layer, HyperSETLayer) and layer.descent.kind != "plain":
            raise ValueError(
                "descent must be 'plain' where a fixed point of the layer's step is wanted, got "
                f"{layer.descent.kind!r}"
            )


def descend(
    z: Tensor, energy: ProjectedEnergy, step: Step, mask: Tensor | None, weight: Tensor | None
) -> Tensor:
    """``z - step * straight_gradient``; the step a number, (d,) or like ``z``."""
    return move(z, energy.straight_gradient(z, mask=mask, weight=weight), step)


def move(z: Tensor, direction: Tensor, step: Step) -> Tensor:
    """``z - step * direction``."""
    if not isinstance(step, Tensor):
        return torch.sub(z, direction, alpha=step)
    return torch.addcmul(z, step.to(z.dtype), direction, value=-1.0)

"""Step sizes of an unrolled layer: constant, learned, or computed by a network from time and tokens."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.projected import RMSNorm
from implicit_attn.updates.gradient_step import StepSize
from solvers.core.checks import require_choice, require_count

STEP_SIZES = ("conditioned-state", "conditioned-input", "learned", "fixed")
CONDITION_NORM = RMSNorm(epsilon=1e-6)
LONGEST_PERIOD = 10_000.0

Step = float | Tensor


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

    def __init__(self, initial: float, channels: int | None = None, learned: bool = False) -> None:
        super().__init__()
        self.attention = StepSize(initial, channels, learned)
        self.feedforward = StepSize(initial, channels, learned)

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
        if source not in ("state", "input"):
            raise ValueError(f"source must be 'state' or 'input', got {source!r}")
        if not math.isfinite(initial):
            raise ValueError(f"initial must be finite, got {initial!r}")
        self.source, self.time_dim, self.initial = source, _check_time_dim(time_dim), float(initial)
        self.embedding = nn.Sequential(
            nn.Linear(time_dim, require_count("dim", dim)), nn.GELU(), nn.Linear(dim, dim)
        )
        self.last = nn.Linear(dim, 2 * dim)
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, self.initial)

    def prepare(self, x0: Tensor, times: Tensor) -> tuple[Tensor, Tensor | None]:
        """``embed(times)`` (T, d), and ``norm(x0)`` where the steps are conditioned on it."""
        waves = sinusoids(times, self.time_dim).to(self.last.weight.dtype)
        condition = CONDITION_NORM.normalise(x0)[0] if self.source == "input" else None
        return self.embedding(waves), condition

    def forward(self, z: Tensor, context: Any, index: int) -> tuple[Tensor, Tensor]:
        embedded, condition = context
        if condition is None:
            condition = CONDITION_NORM.normalise(z)[0]
        alpha, gamma = self.last(F.gelu(condition + embedded[index])).chunk(2, dim=-1)
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
    learned = kind == "learned"
    return PlainStepSizes(start, channels=dim if learned else None, learned=learned)


def _check_time_dim(count: Any) -> int:
    if require_count("time_dim", count) % 2 or count < 4:
        raise ValueError(f"time_dim must be even and >= 4, got {count}")
    return count

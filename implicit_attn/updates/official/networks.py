"""The networks of step sizes in the official code of Hyper-SET, which differ from that of its paper."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.updates.step_sizes import (
    ConditionedStepSizes,
    StepSizes,
    build_step_sizes,
    sinusoids,
)
from solvers.core.checks import require_choice, require_count

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

    The official code starts ``embed`` with weights 0, as well as ``last``. Then no gradient ever reaches
    the weights of ``embed``: its output is 0 before the second Linear and what it hands back is 0 before
    the first, so that the step sizes learn nothing of the time. Here ``embed`` starts at random.

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
        self.inner = nn.RMSNorm(dim) if normed else None
        self.outer = nn.RMSNorm(dim) if outer else None

    def prepare(self, x0: Tensor, times: Tensor) -> tuple[Tensor, Tensor | None]:
        """``embed(times)`` (T, d), and ``inner(x0)`` where the steps are conditioned on it."""
        waves = sinusoids(times, self.time_dim).to(self.last.weight.dtype)
        condition = self._condition(x0) if self.source == "input" else None
        return self.embedding(waves), condition

    def forward(self, z: Tensor, context: Any, index: int) -> tuple[Tensor, Tensor]:
        embedded, condition = context
        hidden = embedded[index] + (self._condition(z) if condition is None else condition)
        hidden = hidden if self.outer is None else self.outer(hidden)
        alpha, gamma = self.last(F.gelu(hidden)).chunk(2, dim=-1)
        return alpha, gamma

    def _condition(self, c: Tensor) -> Tensor:
        return c if self.inner is None else self.inner(c)

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

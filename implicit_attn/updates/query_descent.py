"""Attention as descent: queries move down their energy among the keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_attn.energies.energy import Energy
from implicit_attn.energies.heads.inputs import AttentionInput
from implicit_attn.energies.heads.query_energy import HeadwiseEnergy, QueryEnergy
from implicit_attn.energies.heads.temperatures import Beta
from implicit_attn.energies.prepared import Prepared
from implicit_attn.updates.gradient_step import GradientStep
from solvers.core.checks import require_choice, require_count, require_instance


class QueryDescent(GradientStep):
    r"""``q <- q - eta dE/dq``, every query of every head down its own energy among the keys.

    By default ``E(q) = 1/2 |q|^2 - beta^-1 log sum_j exp(beta q.k_j)``. Then a unit step is softmax
    attention with the keys for values, and no step with ``eta <= 1`` raises E.

    ``context="frozen"``: the keys are given and stay. ``context="live"``, for self-attention: the keys
    are the queries as they stand at each step, ``q <- q - eta dE/dq`` at ``k_j = q_j``; what moves the
    keys is left out, so that this descends no energy. With the default energy and ``eta = 1`` all
    tokens then shrink to one point. Every point is one where they may meet: there is no single fixed
    point, and no implicit gradient.

    Shapes: ``z`` (B, N, d), the queries, each head a slice of ``p = d / heads`` features. ``x`` frozen:
    the keys (B, M, d), a pair of them and a mask (B, M), or an ``AttentionInput`` with such a memory,
    which may also hold pairs and their biases. Live: None, or an ``AttentionInput`` without memory whose
    ``memory_mask`` (B, N) is False at masked tokens. ``mask`` (B, N), of the queries.

    Args:
        dim: features d of queries and keys.
        heads: a divisor of ``dim``.
        energy: an :class:`Energy` of the queries (B', N, p) of one head, B' = B heads, whose input is an
            ``AttentionInput``: ``memory`` (B', M, p) holds the keys, ``memory_mask`` and ``pairs`` say
            which there are, ``tokens`` (B', N, p) are what the caller put there. None: the above.
        step_size: eta, > 0.
        beta: inverse temperature, > 0, of the default energy, or one for each head; None: ``1 / sqrt(p)``.
        context: "frozen" or "live".

    Source: Bal, "Attention as Energy Minimization: Visualizing Energy Landscapes" (2021),
    https://mcbal.github.io/post/attention-as-energy-minimization-visualizing-energy-landscapes/; the
    energy: Ramsauer et al. (2020), https://arxiv.org/abs/2008.02217.
    """

    energy: QueryEnergy | HeadwiseEnergy

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        *,
        energy: Energy | None = None,
        step_size: float = 1.0,
        beta: Beta = None,
        context: str = "frozen",
    ) -> None:
        require_instance("energy", energy, Energy, "an Energy", optional=True)
        if energy is not None and beta is not None:
            raise ValueError(f"beta belongs to the default energy, got beta={beta!r} and an energy")
        keyed = QueryEnergy(dim, heads, beta=beta)  # checks dim, heads and beta
        super().__init__(keyed if energy is None else HeadwiseEnergy(energy, heads), step_size)
        self.dim, self.heads = require_count("dim", dim), heads
        self.context = require_choice("context", context, ("frozen", "live"))
        # Live keys: the gradient by the queries alone is the gradient of nothing.
        self.symmetric = self.monitored = context == "frozen"

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """The keys of every head, once a solve; ``x`` where they are live or the energy is given."""
        # What a given energy prepares has heads times as many samples, which a solver cannot follow.
        plain = self.context == "frozen" and isinstance(self.energy, QueryEnergy)
        return self.energy.prepare(x, mask=mask) if plain else x

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z, self._among(z, x), mask=mask)

    def joint(
        self, z: Tensor, x: Any = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return super().joint(z, self._among(z, x), mask=mask)

    def energies(self, z: Tensor, x: Any = None) -> Tensor:
        """The energy of each query, (B, heads, N), float32 or wider; for arguments as ``forward``'s."""
        return self.energy.each(z, self._among(z, x))

    def trajectory(self, z: Tensor, x: Any, steps: int) -> tuple[Tensor, Tensor]:
        """States (steps + 1, B, N, d) from ``z`` on, and their energies (steps + 1, B, heads, N)."""
        x = self.prepare(x)
        states = [z]
        for _ in range(require_count("steps", steps)):
            states.append(self(states[-1], x))
        return torch.stack(states), torch.stack([self.energies(state, x) for state in states])

    def _among(self, z: Tensor, x: Any) -> Any:
        if self.context == "frozen" or isinstance(x, Prepared):
            return x
        given = AttentionInput() if x is None else x
        if not isinstance(given, AttentionInput) or given.memory is not None:
            raise ValueError(
                "QueryDescent (live): x must be None or an AttentionInput without memory, got "
                f"{'one with memory' if isinstance(given, AttentionInput) else type(x).__name__}"
            )
        return given._replace(memory=z)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, context={self.context}"

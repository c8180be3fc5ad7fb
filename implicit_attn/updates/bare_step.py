"""The step of bare self-attention: each token by its own energy, then back to its sphere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_attn.energies.bare import BareAttention
from implicit_attn.energies.tokens import accumulation_dtype, hide
from implicit_attn.updates.update import Update
from solvers.core.checks import require_count, require_instance, require_number, require_positive


class BareAttentionStep(Update):
    r"""``f(z)_i = normalise((1 - gamma) sum_j alpha_ij J_ij z_j + gamma z_i)``, all tokens at once.

    ``sum_j alpha_ij J_ij z_j = -de_i/dz_i`` descends the token's *own* term of the energy, with
    all others held; the sum of the terms may rise, so no energy is monitored. ``gamma = 1/2`` is the
    residual form ``z_i + sum_j alpha_ij J_ij z_j``. Without the normalisation the states shrink to
    zero or grow without bound.

    As a layer, ``DEQ(BareAttentionStep(energy), solver=solvers.Forward())``: from states far from a fixed
    point plain iteration runs to an attractor where Anderson's mixing may stall.

    Args:
        energy: a :class:`BareAttention`.
        gamma: share of the old state, in [0, 1).
        radius: of a token's sphere, finite, > 0; None: no normalisation.
        circles: the token is cut into this many equal parts, each normalised to
            ``radius / sqrt(circles)``: 1 for the sphere of the whole token, D / 2 for pixels that are
            points on circles of their own.

    Shapes: ``z`` (B, N, D); ``x`` is ignored; ``mask`` (B, N) bool. Masked tokens and tokens without
    neighbours keep their state, whatever its norm, and so do parts that would become 0 and have no
    direction.

    Source: D'Amico and Negri (2024), https://arxiv.org/abs/2409.16112.
    """

    def __init__(
        self,
        energy: BareAttention,
        *,
        gamma: float = 0.0,
        radius: float | None = 1.0,
        circles: int = 1,
    ) -> None:
        super().__init__()
        self.energy = require_instance("energy", energy, BareAttention, "a BareAttention")
        self.gamma = require_number("gamma", gamma, low=0.0, high=1.0)
        if gamma == 1.0:
            raise ValueError("gamma must be below 1, got 1.0: nothing would move")
        self.radius = None if radius is None else require_positive("radius", radius)
        self.circles = require_count("circles", circles)
        if energy.width % circles:
            raise ValueError(f"circles must divide the {energy.width} components, got {circles}")

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        pull = self.energy.pull(z, mask=mask)
        seen = hide(z, mask)
        moved = (1 - self.gamma) * pull + self.gamma * seen
        if self.radius is not None:
            moved = self._normalised(moved, seen)
        if mask is None:
            return moved if z.shape[1] > 1 else z.clone()
        hears = mask & (mask.sum(-1, keepdim=True) > 1)
        return torch.where(hears.unsqueeze(-1), moved, z)

    def _normalised(self, moved: Tensor, z: Tensor) -> Tensor:
        """Each part of ``moved`` at its radius; a part of norm 0 is that of ``z``."""
        assert self.radius is not None
        wide = accumulation_dtype(z.dtype)
        parts = moved.to(wide).unflatten(-1, (self.circles, -1))
        largest = parts.detach().abs().amax(-1, keepdim=True)  # else squares leave the range
        lives = largest != 0  # NaN stays NaN
        parts = torch.where(lives, parts / torch.where(lives, largest, 1.0), 1.0)
        scale = self.radius / self.circles**0.5
        unit = parts * (scale * parts.square().sum(-1, keepdim=True).rsqrt())
        kept = z.to(wide).unflatten(-1, (self.circles, -1))
        return torch.where(lives, unit, kept).flatten(-2).to(z.dtype)

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, radius={self.radius}, circles={self.circles}"

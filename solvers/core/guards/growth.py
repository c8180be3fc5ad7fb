"""Samples that run away down an energy without a minimum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.core.arrays import on_host

FAR = 8.0  # |f(z)| against the start, beyond which a small relative residual needs a reason
LOST = 1e3  # beyond which a sample that did not converge has diverged
FALLEN = 0.5  # a residual below this share of its peak is a reason


@dataclass
class Growth:
    """Per sample, where its energy takes it; tensors (n,).

    Down an unbounded energy ``|f(z)|`` grows, and the relative residual ``|f(z) - z| / |f(z)|`` falls by
    that alone. A minimum, however far, makes the residual itself fall from its peak.
    """

    peak: Tensor  # largest force at the accepted points: |dE/dz|, else |f(z) - z|
    scale: Tensor  # size of the start: |f(z)| or |f(z) - z|
    lost: Tensor  # bool, at the last accepted point, far away at a force near its peak

    @classmethod
    def start(cls, norm: Tensor, reference: Tensor) -> Growth:
        lost = torch.zeros_like(norm, dtype=torch.bool)
        return cls(torch.zeros_like(norm), torch.maximum(norm, reference), lost)

    def note(
        self, norm: Tensor, reference: Tensor, gradient: Tensor | None, taken: Tensor
    ) -> Tensor | None:
        """Rows (n,) bool whose residual is small by growth alone; None where there are none.

        The rows ``taken`` have moved to a point with these norms. Far away ``f(z) - z`` is all
        rounding; the gradient (n, D) is not, so it counts where it is known.
        """
        force = norm if gradient is None else _norm(gradient)
        self.peak = torch.where(taken, torch.maximum(self.peak, force), self.peak)
        far = reference > FAR * self.scale
        if on_host(norm.device) and not far.any():
            return None
        high = force > FALLEN * self.peak
        self.lost = torch.where(taken, high & (reference > LOST * self.scale), self.lost)
        return high & far


def _norm(gradient: Tensor) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient.detach(), dim=1, dtype=wide)

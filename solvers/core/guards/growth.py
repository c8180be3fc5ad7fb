"""Samples that run away down an energy without a minimum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from solvers.core.device import maybe_any

FAR = 8.0  # |f(z)| against the start, beyond which a small relative residual needs a reason
FALLEN = 0.5  # a force above this share of its peak is none
LOST = 1e3  # far beyond FAR, and the energy fallen far: a sample that did not converge has diverged
AHEAD = 0.1  # ... unless what its force promises over |f(z)| is less than this share of the fall


class Evaluated(Protocol):
    """What is read of a point, see :class:`solvers.core.rows.Point`."""

    norm: Tensor
    reference: Tensor
    energy: Tensor | None
    gradient: Tensor | None


@dataclass
class Growth:
    """Per sample, where its energy takes it; tensors (n,).

    Down an unbounded energy ``|f(z)|`` grows, and the relative residual ``|f(z) - z| / |f(z)|`` falls by
    that alone. A minimum, however far, makes the force itself fall from its peak, and by more than
    the state has grown since: the forces ``a z^(a-1)`` of unbounded powers ``-z^a`` fall by less.
    """

    peak: Tensor  # largest force at the accepted points: |dE/dz|, else |f(z) - z|
    place: Tensor  # |f(z)| at that point, and at least the scale
    scale: Tensor  # size of the start: |f(z)| or |f(z) - z|
    energy: Tensor  # at the start
    much: Tensor  # what an energy falls by that falls far
    lost: Tensor  # bool, at the last accepted point, far away at a force near its peak

    @classmethod
    def start(cls, point: Evaluated) -> Growth:
        """From the first evaluation, with its energy."""
        energy, force = _energy(point), _force(point)
        scale = torch.maximum(point.norm, point.reference).detach()
        # The energy's size counts: out of a saddle point of height 1 it may well fall by 1, however
        # small the start.
        much = LOST * (energy.abs() + force * scale)
        return cls(force, scale, scale, energy, much, torch.zeros_like(scale, dtype=torch.bool))

    def note(self, point: Evaluated, taken: Tensor) -> Tensor | None:
        """Rows (n,) bool whose residual is small by growth alone; None where there are none.

        The rows ``taken`` have moved to ``point``. Far away ``f(z) - z`` is all rounding; the
        gradient is not, so it counts where it is known.
        """
        force, reference = _force(point), point.reference.detach()
        higher = taken & (force > self.peak)
        self.peak = torch.where(higher, force, self.peak)
        self.place = torch.where(higher, torch.maximum(reference, self.scale), self.place)
        far = reference > FAR * self.scale
        if not maybe_any(far | self.lost):
            return None
        share = (FAR * self.place / reference).clamp_max(FALLEN)
        near_peak = far & (force > share * self.peak)
        fall = self.energy - _energy(point)
        away = near_peak & (reference > LOST * self.scale)
        away = away & (fall > self.much) & (force * reference > AHEAD * fall)
        self.lost = torch.where(taken, away, self.lost)
        return near_peak


def _energy(point: Evaluated) -> Tensor:
    assert point.energy is not None
    return point.energy.detach().to(_wide(point.energy))


def _force(point: Evaluated) -> Tensor:
    gradient = point.gradient
    if gradient is None:
        return point.norm.detach()
    return torch.linalg.vector_norm(gradient.detach(), dim=1, dtype=_wide(gradient))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)

"""Acceptance of trial points (Armijo's rule) and the step after a rejection (backtracking)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.core.rows import Point, small_dtype

ARMIJO = 1e-4  # share of the predicted decrease that a step must deliver
MAX_REJECTIONS = 40  # consecutive rejections after which a row gives up


@dataclass
class Backtracking:
    """The fall-back step ``z + t (f(z) - z)`` of every row."""

    scale: Tensor  # (B,) t
    rejections: Tensor  # (B,) consecutive ones

    @classmethod
    def start(cls, norm: Tensor) -> Backtracking:
        return cls(torch.ones_like(norm), torch.zeros_like(norm, dtype=torch.int64))

    def note(self, accepted: Tensor | None) -> None:
        """Count consecutive rejections; None: every row was accepted."""
        if accepted is None:
            accepted = torch.ones_like(self.rejections, dtype=torch.bool)
        recovered = accepted & (self.rejections > 0)
        self.scale = torch.where(recovered, (2 * self.scale).clamp_max(1.0), self.scale)
        self.rejections = torch.where(accepted, 0, self.rejections + 1)

    def step(self, current: Point, trial: Point) -> Tensor:
        """Fall-back steps from ``current``, after ``trial`` was noted as rejected.

        After the first rejection t is 1, or the last t that was accepted; then it shrinks, by
        interpolation of the energy or by half.
        """
        shorter = self.scale * interpolation(current, trial)
        self.scale = torch.where(self.rejections > 1, shorter, self.scale)
        return current.z + self.scale[:, None].to(current.z.dtype) * current.residual


def acceptable(trial: Point, last: Point | None, limit: Tensor) -> Tensor:
    """(B,) bool: the trial is finite, its residual within ``limit``, and it passes Armijo's rule.

    Armijo: ``E(trial) <= E(last) + c <dE(last), trial - last>`` with c = 1e-4, where energies are
    known; without a gradient the energy must not rise. Where the energies agree to rounding, the
    trial is accepted if its residual is not larger. The first trial (no ``last``) need be finite only.
    """
    finite = trial.finite()
    if last is None:
        return finite
    finite = finite & (trial.norm <= limit)
    if trial.energy is None or last.energy is None:
        return finite
    energy, before = trial.energy.detach(), last.energy.detach()
    allowed = before
    if last.gradient is not None:
        allowed = before + ARMIJO * slope_of(trial, last).clamp_max(0.0)
    same = (energy <= before + rounding(before)) & (trial.norm <= last.norm)
    return finite & ((energy <= allowed) | same)


def slope_of(trial: Point, start: Point) -> Tensor:
    """(B,) ``<dE(start), trial - start>``, in float32 or wider."""
    assert start.gradient is not None
    wide = small_dtype(trial.z.dtype)
    moved = (trial.z - start.z).detach().to(wide)
    return (moved * start.gradient.detach().to(wide)).sum(1)


def rounding(energy: Tensor) -> Tensor:
    """(B,) differences of energies below this are noise."""
    return 8 * torch.finfo(energy.dtype).eps * energy.abs()


def interpolation(current: Point, trial: Point) -> Tensor:
    """(B,) factor in [0.1, 0.5] for the step: minimiser of the interpolating parabola, else 0.5.

    The parabola has the energy and the slope of ``current`` and the energy of ``trial``.
    """
    if current.gradient is None or current.energy is None or trial.energy is None:
        return torch.full_like(current.norm, 0.5)
    slope = slope_of(trial, current)
    rise = (trial.energy - current.energy).detach() - slope
    factor = -slope / (2 * rise)
    return torch.nan_to_num(factor, nan=0.1, posinf=0.5, neginf=0.1).clamp(0.1, 0.5)

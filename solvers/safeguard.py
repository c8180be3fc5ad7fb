"""Which trial points are taken: finite ones, and with an energy those that do not raise it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.solver import Point, where_rows

ARMIJO = 1e-4  # share of the predicted decrease that a step must deliver
MAX_REJECTIONS = 40  # consecutive rejections after which a row gives up


@dataclass
class Backtracking:
    """Per-row state of the fall-back step.

    Attributes:
        scale: (B,) length of the plain step tried after a rejection.
        rejections: (B,) consecutive rejections.
    """

    scale: Tensor
    rejections: Tensor

    @classmethod
    def start(cls, norm: Tensor) -> Backtracking:
        return cls(torch.ones_like(norm), torch.zeros_like(norm, dtype=torch.int64))


def acceptable(trial: Point, last: Point | None) -> Tensor:
    """(B,) bool: the trial is finite and, where energies are known, passes Armijo's rule.

    ``E(trial) <= E(last) + c <dE(last), trial - last>`` with c = 1e-4; without a gradient the
    energy must not rise. Where two energies agree to rounding they cannot be told apart, and the
    trial is taken if its residual is not larger.
    """
    # Both norms: a residual over an overflowed f(z) would look converged.
    finite = torch.isfinite(trial.norm + trial.reference)
    if trial.energy is None:
        return finite
    energy = trial.energy.detach()
    finite = finite & torch.isfinite(energy)
    if last is None or last.energy is None:
        return finite
    before = last.energy.detach()
    allowed = before
    if last.gradient is not None:
        slope = ((trial.z - last.z) * last.gradient).detach().sum(1).clamp_max(0.0)
        allowed = before + ARMIJO * slope
    rounding = 8 * torch.finfo(energy.dtype).eps * before.abs()
    same = (energy <= before + rounding) & (trial.norm <= last.norm)
    return finite & ((energy <= allowed) | same)


def fall_back(
    memory: Backtracking, current: Point, trial: Point, accepted: Tensor, candidate: Tensor
) -> Tensor:
    """Next trial: the solver's ``candidate`` in accepted rows, a safer one in rejected rows.

    With an energy the safer one is a plain step ``z + t (f(z) - z)``: t = 1 (or the last length
    that worked) after a rejected accelerated step, then shorter by quadratic interpolation.
    Without one it is the midpoint between the current iterate and the non-finite trial.
    """
    first = memory.rejections == 0
    memory.rejections = torch.where(accepted, 0, memory.rejections + 1)
    if current.energy is None:
        safer = current.z + 0.5 * (torch.nan_to_num(trial.z) - current.z)
        return where_rows(accepted, candidate, safer)
    shorter = memory.scale * interpolation(current, trial)
    grown = torch.where(first, memory.scale, (2 * memory.scale).clamp_max(1.0))
    memory.scale = torch.where(accepted, grown, torch.where(first, memory.scale, shorter))
    safer = current.z + memory.scale[:, None].to(current.z.dtype) * current.residual
    return where_rows(accepted, candidate, safer)


def interpolation(current: Point, trial: Point) -> Tensor:
    """(B,) factor in [0.1, 0.5]: minimiser of the parabola through E, its slope and the trial's E."""
    if current.gradient is None or current.energy is None or trial.energy is None:
        return torch.full_like(current.norm, 0.5)
    slope = ((trial.z - current.z) * current.gradient).detach().sum(1)
    rise = (trial.energy - current.energy).detach() - slope
    factor = -slope / (2 * rise)
    return torch.nan_to_num(factor, nan=0.1, posinf=0.5, neginf=0.1).clamp(0.1, 0.5)

"""Acceptance of trial points (Armijo's rule), the step after a rejection, and energies without a minimum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.core.rows import Evaluation, Rows, small_dtype

ARMIJO = 1e-4  # share of the predicted decrease that a step must deliver
SHORTEST = 0.1  # least factor by which one interpolation shortens a step
MAX_REJECTIONS = 40  # consecutive rejections after which a row gives up


def count_rejections(rows: Rows, accepted: Tensor | None) -> None:
    """Count the consecutive rejections of every row; None: every row was accepted."""
    if accepted is None:
        accepted = torch.ones_like(rows.rejections, dtype=torch.bool)
    recovered = accepted & (rows.rejections > 0)
    rows.scale = torch.where(recovered, (2 * rows.scale).clamp_max(1.0), rows.scale)
    rows.rejections = torch.where(accepted, 0, rows.rejections + 1)


def fallback_step(rows: Rows, current: Evaluation, trial: Evaluation) -> Tensor:
    """The point ``z + t (f(z) - z)`` of every row, after ``trial`` was counted as rejected.

    After the first rejection t is 1, or the last t that was accepted; then it shrinks, by
    interpolation of the energy or by half.
    """
    shorter = rows.scale * interpolation(current, trial, cubic=False)
    rows.scale = torch.where(rows.rejections > 1, shorter, rows.scale)
    return current.z + rows.scale[:, None].to(current.z.dtype) * current.residual


def acceptable(trial: Evaluation, last: Evaluation | None, limit: Tensor) -> Tensor:
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


def slope_of(trial: Evaluation, start: Evaluation, at: Evaluation | None = None) -> Tensor:
    """(B,) ``<dE(at), trial - start>``, in float32 or wider; ``at`` is ``start`` by default."""
    gradient = (at or start).gradient
    assert gradient is not None
    wide = small_dtype(trial.z.dtype)
    moved = (trial.z - start.z).detach().to(wide)
    return (moved * gradient.detach().to(wide)).sum(1)


def rounding(energy: Tensor) -> Tensor:
    """(B,) differences of energies below this are noise."""
    return 8 * torch.finfo(energy.dtype).eps * energy.abs()


def interpolation(current: Evaluation, trial: Evaluation, cubic: bool = True) -> Tensor:
    """(B,) factor in [SHORTEST, 0.5] for the step that led from ``current`` to ``trial``.

    The minimiser of the cubic that has the energies and slopes of both points (Nocedal and Wright,
    "Numerical Optimization", eq. 3.59); where there is none, of the parabola without the trial's
    slope, or unless ``cubic``; SHORTEST after a trial that is not finite, and 0.5 where no gradient is known.
    """
    if current.gradient is None or current.energy is None or trial.energy is None:
        return torch.full_like(current.norm, 0.5)
    slope = slope_of(trial, current)
    change = (trial.energy - current.energy).detach()
    factor = -slope / (2 * (change - slope))
    if cubic and trial.gradient is not None:
        last = slope_of(trial, current, at=trial)
        theta = slope + last - 3 * change
        root = (theta * theta - slope * last).clamp_min(0).sqrt()
        smooth = 1 - (last + root - theta) / (last - slope + 2 * root)
        factor = torch.where(torch.isfinite(smooth), smooth, factor)
    factor = torch.where(trial.finite(), factor, SHORTEST)
    return torch.nan_to_num(factor, nan=SHORTEST).clamp(SHORTEST, 0.5)


FAR = 8.0  # |f(z)| against the start, beyond which a small relative residual needs a reason
FALLEN = 0.5  # a force above this share of its peak is none
# Far beyond FAR, and the energy fallen far: a sample that did not converge has diverged.
DIVERGED_AT = 1e3
AHEAD = 0.1  # ... unless what its force promises over |f(z)| is less than this share of the fall


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
    diverging: Tensor  # bool, at the last accepted point, far away at a force near its peak

    @classmethod
    def start(cls, point: Evaluation) -> Growth:
        """From the first evaluation, with its energy."""
        energy, force = _energy(point), _force(point)
        scale = torch.maximum(point.norm, point.reference).detach()
        # The energy's size counts: out of a saddle point of height 1 it may well fall by 1, however
        # small the start.
        much = DIVERGED_AT * (energy.abs() + force * scale)
        return cls(force, scale, scale, energy, much, torch.zeros_like(scale, dtype=torch.bool))

    def note(self, point: Evaluation, taken: Tensor) -> Tensor | None:
        """Rows (n,) bool whose residual is small by growth alone; None where there are none.

        The rows ``taken`` have moved to ``point``. Far away ``f(z) - z`` is all rounding; the
        gradient is not, so it counts where it is known.
        """
        force, reference = _force(point), point.reference.detach()
        higher = taken & (force > self.peak)
        self.peak = torch.where(higher, force, self.peak)
        self.place = torch.where(higher, torch.maximum(reference, self.scale), self.place)
        far = reference > FAR * self.scale
        if not bool((far | self.diverging).any()):
            return None
        share = (FAR * self.place / reference).clamp_max(FALLEN)
        near_peak = far & (force > share * self.peak)
        fall = self.energy - _energy(point)
        away = near_peak & (reference > DIVERGED_AT * self.scale)
        away = away & (fall > self.much) & (force * reference > AHEAD * fall)
        self.diverging = torch.where(taken, away, self.diverging)
        return near_peak


def _energy(point: Evaluation) -> Tensor:
    assert point.energy is not None
    return point.energy.detach().to(small_dtype(point.energy.dtype))


def _force(point: Evaluation) -> Tensor:
    gradient = point.gradient
    if gradient is None:
        return point.norm.detach()
    return torch.linalg.vector_norm(gradient.detach(), dim=1, dtype=small_dtype(gradient.dtype))

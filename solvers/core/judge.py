"""When a sample has converged: its residual and its estimated error, each within the tolerance.

A residual alone says little about the error of the value: where ``f(z) - z`` changes slowly, the fixed point
may be far away, and a scale that grows with the iterate makes any bounded residual look small. Therefore,
with the residual ``r = f(z) - z`` and the scale ``|f(z)|``, a sample has converged where

- ``|r| <= max(rtol |f(z)|, atol)``, and at most ``max(rtol s, atol, |r_max| / 100)`` with the size
  ``s = |f(z_0)| + |r_0|`` of the start and the largest residual ``r_max`` so far, up to that size, and
- the estimated error is at most ``max(rtol |f(z)|, atol)``, where ``|f(z)|`` counts up to a million times the
  size of the start.

The error ``z* - z`` is ``(I - J)^-1 r`` to first order. Its size is estimated by the largest gain
``|dz| / |dr|`` of the last ten accepted steps::

    |z* - z|  ~  |r| max_j |dz_j| / |dr_j|

The estimate costs no evaluation, does not depend on the units of ``r``, and is the same for every solver.
Before the first step there is none, and only a residual that is zero to rounding has converged.

The residual of a gradient step of an energy, or of a root, is in units of its own. There the error alone
decides, against ``max(rtol |z|, atol)``: at two accepted points in a row, or at one after at least four steps
if the residual has fallen to a hundredth. With ``rtol = 0`` the residual alone decides, against ``atol``.

The leaves of a pytree, or the parts of a ``measure``, are judged one by one: all of them must converge. Where
a sample stalls, diverges or runs out of evaluations is decided in ``core/loop.py``. The same rules in C++:
``native/turns.h``; on buffers for CUDA: ``methods/turns.py`` and ``methods/triton_kernels.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.core.rows import Evaluation
from solvers.core.solution import Tolerance

STEPS = 10  # accepted steps whose gains are remembered
SURE = 4  # steps after which the estimate for an energy or a root need not be confirmed
FALLEN = 0.01  # share of the first residual below which the scale of the start no longer counts
IMPRECISE = 100  # at least so many rounding units, of which half precision has few
ROUNDINGS = 4  # a residual of so many roundings of f(z) is zero as far as can be told


@dataclass(frozen=True)
class Rule:
    """What a solve asks of its samples.

    ``eps`` is the rounding unit in which f computes. ``unit_free``: the residual is not in units of the
    state.
    """

    tolerance: Tolerance
    eps: float
    unit_free: bool = False

    @property
    def fallen(self) -> float:
        """Share of the first residual that may count as converged."""
        return max(FALLEN, IMPRECISE * self.eps)

    def caps(self, first: Evaluation) -> Tensor:
        """(B, L) largest residual that may count as converged, whatever becomes of ``|f(z)|``."""
        share = self.fallen * first.norms
        if self.unit_free:
            return share
        size = first.references + first.norms
        limit = torch.maximum(self.tolerance.threshold(size), 10 * self.eps * size)
        return torch.maximum(limit, share)

    def grown(self, point: Evaluation, caps: Tensor, start: Tensor) -> Tensor:
        """(B, L) the same after another point, for parts that start at zero and are driven by others.

        They grow with the residual, at most to the size (B,) of the whole ``start``.
        """
        return torch.maximum(caps, self.fallen * torch.minimum(point.norms, start[:, None]))

    def allowed(self, point: Evaluation, caps: Tensor) -> Tensor:
        """(B, L) residual norms that count as converged."""
        if self.unit_free:
            return torch.full_like(point.norms, self.tolerance.atol)
        return torch.minimum(self.tolerance.threshold(point.references), caps)

    def score(self, point: Evaluation, caps: Tensor) -> Tensor:
        """(B,) by which iterates are compared: the residual in units of what is allowed.

        It is finite where the residual is.
        """
        if self.unit_free:
            return point.norm
        allowed = self.allowed(point, caps)
        limits = torch.finfo(allowed.dtype)
        scores = point.norms / allowed.masked_fill(allowed == 0, limits.tiny)
        return scores.clamp_max(limits.max).amax(1)

    def near(self, point: Evaluation, caps: Tensor, error: Tensor, limit: Tensor) -> Tensor:
        """(B,) bool: the errors (B, L) are within the tolerance, or the residual is rounding.

        Beyond the ``limit`` (B,) the size of the value is no scale.
        """
        scale = torch.minimum(point.references, limit[:, None])
        near = error <= self.tolerance.threshold(scale)
        if not self.unit_free:
            rounding = ROUNDINGS * self.eps * scale
            near = near | (point.norms <= rounding) & (rounding <= caps)
        return near.all(1)

    def converged(
        self, point: Evaluation, caps: Tensor, near: Tensor, before: Tensor, gain: Tensor
    ) -> Tensor:
        """(B,) bool, where the point is ``near`` (B,), and the last accepted one was ``before`` (B,)."""
        if self.unit_free:
            if self.tolerance.rtol == 0:
                return (point.norms <= self.tolerance.atol).all(1)
            sure = (point.norms <= caps) & ((gain > 0).sum(2) >= SURE)
            return near & (before | sure.all(1) | (point.norm == 0))
        # Far away rounding would hide a residual of this size.
        seen = self.eps * point.references <= caps
        return near & (seen & (point.norms <= self.allowed(point, caps))).all(1)


def estimated_error(point: Evaluation, gain: Tensor) -> Tensor:
    """(B, L) errors of ``point`` from the remembered gains (B, L, STEPS), 0 for those that are unknown."""
    largest = gain.amax(2)
    error = torch.where(largest == 0, torch.inf, point.norms * largest)
    return error.masked_fill(point.norms == 0, 0.0)


def relative_error(point: Evaluation, error: Tensor) -> Tensor:
    """(B,) error of the worst part relative to its scale."""
    limits = torch.finfo(error.dtype)
    scale = point.references.masked_fill(point.references == 0, limits.tiny)
    ratio = (error / scale).clamp_max(limits.max)
    return ratio.where(error < torch.inf, torch.inf).amax(1)

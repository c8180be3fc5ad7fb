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
A single step has seen one direction only, so before the second one only a residual that is zero to rounding
has converged.

Steps mix directions, and the one in which the residual changes least may be hidden in all of them. Therefore
a sample that would converge after more than ten evaluations is examined once more, with the largest gain of
any combination of the last steps, ``max_c |dZ c| / |dR c|``: :func:`span_factor`. Solvers that keep their
steps (:meth:`solvers.core.loop.Solver.pairs`) are judged by it.

The residual of a gradient step of an energy, or of a root, is in units of its own. There the error alone
decides, against ``max(rtol |z|, atol)``: at two accepted points in a row, or at one after at least four steps
if the residual has fallen to a hundredth. A change of such a residual counts as at least one rounding unit of
it. With ``rtol = 0`` the residual alone decides, against ``atol``.

The leaves of a pytree, or the parts of a ``measure``, are judged one by one: all of them must converge. Where
a sample stalls, diverges or runs out of evaluations is decided in ``core/loop.py``, and for buffers in
``methods/turns.py``. Fused forms of both: ``native/turns.h`` in C++, ``methods/triton_kernels.py`` for CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solvers.core.rows import RUNNING, STEPS, Evaluation, small_dtype
from solvers.core.solution import Status
from solvers.core.tolerance import Limits, Tolerance

SURE = 4  # steps after which the estimate for an energy or a root need not be confirmed
FALLEN = 0.01  # share of the first residual below which the scale of the start no longer counts
IMPRECISE = 100  # at least so many rounding units, of which half precision has few
ROUNDINGS = 4  # a residual of so many roundings of f(z) is zero as far as can be told
# Squared changes of the residual, relative to those of single steps, below which combinations of steps show
# where the map is not linear rather than where it is flat.
RESOLUTION = 1e-6


@dataclass(frozen=True)
class Rule:
    """What a solve asks of its samples.

    ``eps`` is the rounding unit in which f computes. ``unit_free``: the residual is not in units of the
    state.
    """

    tolerance: Tolerance | Limits
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
            return self.tolerance.threshold(torch.zeros_like(point.norms))
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

    def gain(
        self, point: Evaluation, last: Tensor, moved: Tensor, changed: Tensor, plain: Any
    ) -> tuple[Tensor, Tensor]:
        """(B, L) the gains ``|dz| / |dr|`` of the steps to ``point``, and whether they are known.

        Args:
            last: (B, L) norms of the residual before.
            moved, changed: (B, L) norms of dz and dr.
            plain: whether a step is a multiple of the residual. Then the rate counts, which no oscillation
                hides: ``|r| / (|r| - |r'|) = 1 / (1 - rate)``.
        """
        fallen = last - point.norms
        changed = torch.where((fallen > 0) & plain, fallen, changed)
        if self.unit_free:  # smaller changes are hidden by rounding
            changed = changed.maximum(self.eps * last)
        return moved / changed, moved > self.eps * point.references  # not only by rounding

    def error(self, point: Evaluation, gain: Tensor, least: int = 2) -> Tensor:
        """(B, L) estimated errors of ``point`` from the gains (B, L, STEPS), 0 where they are unknown.

        They are infinite until ``least`` steps of a map are known. One step is enough for an energy or a
        root, of which :meth:`converged` asks for more.
        """
        enough = (gain > 0).sum(2) >= (1 if self.unit_free else least)
        error = torch.where(enough, point.norms * gain.amax(2), torch.inf)
        return error.masked_fill(point.norms == 0, 0.0)

    def room(self, point: Evaluation, caps: Tensor, error: Tensor, limit: Tensor) -> Tensor:
        """(B,) by which the errors (B, L) may grow within the tolerance; below 1 where they are beyond it.

        Infinite where the residual is rounding. Beyond the ``limit`` (B,) the size of the value is no scale.
        """
        scale = torch.minimum(point.references, limit[:, None])
        room = torch.where(error == 0, torch.inf, self.tolerance.threshold(scale) / error)
        if not self.unit_free:
            rounding = ROUNDINGS * self.eps * scale
            room = room.masked_fill((point.norms <= rounding) & (rounding <= caps), torch.inf)
        return room.amin(1)

    def converged(
        self, point: Evaluation, caps: Tensor, near: Tensor, before: Tensor, gain: Tensor
    ) -> Tensor:
        """(B,) bool, where the point is ``near`` (B,), and the last accepted one was ``before`` (B,)."""
        if self.unit_free:
            if isinstance(self.tolerance, Tolerance) and self.tolerance.rtol == 0:
                return (point.norms <= self.tolerance.atol).all(1)
            sure = (point.norms <= caps) & ((gain > 0).sum(2) >= SURE)
            return near & (before | sure.all(1) | (point.norm == 0))
        # Far away rounding would hide a residual of this size.
        seen = self.eps * point.references <= caps
        return near & (seen & (point.norms <= self.allowed(point, caps))).all(1)


def stiffness(gain: Tensor) -> Tensor:
    """(B, L) the median of ``|dr| / |dz|``, the inverse of the gains (B, L, STEPS); 0 where none is known."""
    inverse = torch.where(gain > 0, 1 / gain, 0.0).sort(2, descending=True).values
    middle = (gain > 0).sum(2, keepdim=True) // 2
    return inverse.gather(2, middle.clamp_max(STEPS - 1)).squeeze(2)


def span_factor(steps: Tensor, changes: Tensor) -> Tensor:
    """(n,) how far the gain of a combination of steps exceeds that of any of them, >= 1.

    For steps dZ and changes dR (n, m, D) of the residual it is ``max_c |dZ c| / |dR c|`` over
    ``max_j |dz_j| / |dr_j|``. The maximum is the largest eigenvalue of ``(dR^T dR)^-1 dZ^T dZ``, with
    ``dR^T dR`` regularised by :data:`RESOLUTION`. Pairs of zeros do not count.
    """
    steps, changes = (t.detach().to(small_dtype(t.dtype)) for t in (steps, changes))
    norms = torch.linalg.vector_norm(changes, dim=2, keepdim=True)
    units = torch.where(norms > 0, 1 / norms, 0.0)
    steps, changes = steps * units, changes * units
    own, other = torch.bmm(steps, steps.mT), torch.bmm(changes, changes.mT)
    other = other + torch.diag_embed(RESOLUTION + (norms == 0).to(other.dtype).squeeze(2))
    root = torch.linalg.cholesky_ex(other)[0]
    half = torch.linalg.solve_triangular(root, own, upper=False)
    ratio = torch.linalg.solve_triangular(root, half.mT, upper=False)
    ratio = ratio.nan_to_num(0.0, 0.0, 0.0)  # where the numbers are not moderate
    largest = torch.linalg.eigvalsh(ratio)[:, -1]
    factor = (largest / own.diagonal(dim1=1, dim2=2).amax(1)).sqrt()
    return factor.nan_to_num(1.0, 1.0, 1.0).clamp_min(1.0)


def sharpen(of: Mapping[str, Any], damping: float | Tensor, most: int) -> Tensor:
    """Let samples of an engine go on that have converged by single steps only; return which, (k,).

    Args:
        of: arrays (B, ...): ``status``, ``evaluations``, ``examined`` (bool), ``count`` of the pairs
            ``steps`` (dz + damping dr) and ``changes`` (dr) that are kept, ``error``, and the factor ``room``
            by which it may grow.
        most: evaluations of a sample at most.
    """
    status, evaluations, examined = of["status"], of["evaluations"], of["examined"]
    claims = (status == Status.CONVERGED) & (evaluations > STEPS) & ~examined
    samples = torch.nonzero(claims).flatten()
    if not samples.numel():
        return samples
    slots = torch.arange(of["steps"].shape[1], device=samples.device)
    empty = (slots >= of["count"][samples, None])[:, :, None]
    steps, changes = (of[name][samples].masked_fill_(empty, 0) for name in ("steps", "changes"))
    factor = span_factor(steps - damping * changes, changes).to(of["error"].dtype)
    of["error"][samples] *= factor
    wrong = factor > of["room"][samples]
    ended = evaluations[samples] >= most
    examined[samples] = ~wrong | ended
    samples, ended = samples[wrong], ended[wrong]
    status[samples] = torch.where(ended, int(Status.MAX_STEPS), RUNNING).to(status.dtype)
    return samples[~ended]


def relative_error(point: Evaluation, error: Tensor) -> Tensor:
    """(B,) error of the worst part relative to its scale."""
    limits = torch.finfo(error.dtype)
    scale = point.references.masked_fill(point.references == 0, limits.tiny)
    ratio = (error / scale).clamp_max(limits.max)
    return ratio.where(error < torch.inf, torch.inf).amax(1)

"""The residual of the returned value, measured once more with the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from solvers.core.rows import Evaluation, scaled_norm
from solvers.core.solution import Solution, Status
from solvers.core.tolerance import Goal

# How far the residual may exceed the tolerance or the residual of the solve, and rounding in units of eps.
SLACK, ROUNDINGS = 2.0, 32.0


def rounded(eps: float, sizes: Tensor, stiffness: Tensor | None) -> Tensor:
    """(B,) residual norms that rounding explains, for states whose parts have these ``sizes`` (B, L).

    They are ``ROUNDINGS`` units ``eps`` of the state, 2 in half precision. The ``stiffness`` (B, L) converts
    them to the units of a residual; where it is 0, or None, a residual is like the state.
    """
    if stiffness is not None:
        sizes = torch.where(stiffness > 0, stiffness * sizes, sizes)
    return (2.0 if eps > 1e-4 else ROUNDINGS) * eps * scaled_norm(sizes)


def differs(norm: Tensor, before: Tensor, rounding: Tensor) -> Tensor:
    """(B,) bool: the residual ``norm`` (B,) is not that of the solve, ``before`` (B,)."""
    return (norm > SLACK * before + rounding) | (before > SLACK * norm + rounding)


def verify(
    solution: Solution, point: Evaluation, goal: Goal, unit_free: bool, among: Tensor | None = None
) -> None:
    """Report the residuals of ``point``, an evaluation at the returned value, in ``solution``.

    A converged sample becomes INCONSISTENT where ``|f(z) - z|`` exceeds
    ``2 max(allowed, residual in the solve)`` by more than rounding; also where it exceeds twice the residual
    in the solve and the error, which grows with it, exceeds twice the tolerance. Where the residual of any
    sample differs from that in the solve by more than this factor, the samples depend on each other: unless
    all of them have converged, all that have become INCONSISTENT. A sample without a finite evaluation keeps
    its infinite residual.

    Args:
        goal: of the solve: its tolerance, and the precision in which f computes.
        unit_free: whether the residual is in units of its own.
        among: (B,) bool, samples that ``point`` is about; None: all.
    """
    norm, reference = point.norm, point.reference
    before, tolerance = solution.residual_norm.to(norm.dtype), goal.allowed(unit_free)
    allowed = torch.maximum(tolerance.threshold(reference), before)
    eps = torch.finfo(goal.precision).eps
    rounding = rounded(eps, point.references, solution._stiffness)
    wrong = ~(norm <= SLACK * allowed + rounding)
    if solution.error is not None:  # it is proportional to the residual
        ratio = torch.where(before > 0, norm / before, 1.0)
        solution.error = solution.error * ratio
        far = solution.error * reference > SLACK * tolerance.threshold(reference)
        wrong = wrong | (far & (norm > SLACK * before + rounding))
    finite = point.finite() & (solution.residual < torch.inf)
    finite = finite if among is None else finite & among
    converged = solution.status == Status.CONVERGED
    # A residual that is not that of the solve shows samples that depend on each other: one problem, which is
    # solved as a whole or not at all.
    changed = differs(norm, before, rounding)
    coupled, solved = (changed & finite).any(), (converged & ~wrong).all()
    wrong = (wrong | coupled & ~solved) & converged
    wrong = wrong if among is None else wrong & among
    solution.status = torch.where(wrong, int(Status.INCONSISTENT), solution.status)
    relative = point.relative().clamp_max(torch.finfo(norm.dtype).max)
    for name, new in (("residual", relative), ("residual_norm", norm)):
        old = getattr(solution, name)
        setattr(solution, name, torch.where(finite, new.to(old.dtype), old))

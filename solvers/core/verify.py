"""The residual of the returned value, measured once more with the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from solvers.core.rows import Evaluation
from solvers.core.solution import HALF, Solution, Status, Tolerance

# How far the residual may exceed the tolerance or the residual of the solve, and rounding in units of eps.
SLACK, ROUNDINGS = 2.0, 32.0


def verify(
    solution: Solution,
    point: Evaluation,
    tolerance: Tolerance,
    precision: torch.dtype,
    among: Tensor | None = None,
) -> None:
    """Report the residuals of ``point``, an evaluation at the returned value, in ``solution``.

    A converged sample becomes INCONSISTENT where ``|f(z) - z|`` exceeds
    ``2 max(allowed, residual in the solve)`` by more than rounding; also where it exceeds twice the residual
    in the solve and the error, which grows with it, exceeds twice the tolerance. Where the residual of any
    sample differs from that in the solve by more than this factor, the samples depend on each other: unless
    all of them have converged, all that have become INCONSISTENT. A sample without a finite evaluation keeps
    its infinite residual.

    Args:
        tolerance: of the solve.
        precision: dtype in which f computes, for rounding.
        among: (B,) bool, samples that ``point`` is about; None: all.
    """
    norm, reference = point.norm, point.reference
    before = solution.residual_norm.to(norm.dtype)
    allowed = torch.maximum(tolerance.threshold(reference), before)
    roundings = 2.0 if precision in HALF else ROUNDINGS
    rounding = roundings * torch.finfo(precision).eps * reference
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
    changed = (norm > SLACK * before + rounding) | (before > SLACK * norm + rounding)
    coupled, solved = (changed & finite).any(), (converged & ~wrong).all()
    wrong = (wrong | coupled & ~solved) & converged
    wrong = wrong if among is None else wrong & among
    solution.status = torch.where(wrong, int(Status.INCONSISTENT), solution.status)
    relative = point.relative().clamp_max(torch.finfo(norm.dtype).max)
    for name, new in (("residual", relative), ("residual_norm", norm)):
        old = getattr(solution, name)
        setattr(solution, name, torch.where(finite, new.to(old.dtype), old))

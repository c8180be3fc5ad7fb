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
    ``2 max(allowed, residual in the solve)`` by more than rounding. A sample without a finite evaluation
    keeps its infinite residual.

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
    wrong = ~(norm <= SLACK * allowed + rounding) & (solution.status == Status.CONVERGED)
    finite = point.finite() & (solution.residual < torch.inf)
    if among is not None:
        wrong, finite = wrong & among, finite & among
    solution.status = torch.where(wrong, int(Status.INCONSISTENT), solution.status)
    relative = point.relative().clamp_max(torch.finfo(norm.dtype).max)
    for name, new in (("residual", relative), ("residual_norm", norm)):
        old = getattr(solution, name)
        setattr(solution, name, torch.where(finite, new.to(old.dtype), old))

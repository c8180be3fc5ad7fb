"""Is the residual that a solve reports that of the value that it returns?

The loop measures residuals along the way, when some samples may have left the batch. Here the returned
value is evaluated once more with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from solvers.core.rows import Point
from solvers.core.solution import HALF, Solution, Status, Tolerance
from solvers.core.telling import origin_of

# Every solve of a function is validated up to this number, and one in so many after that.
ALWAYS, EVERY = 8, 32
# How far the residual may be above the tolerance, and above rounding in units of the precision.
SLACK, ROUNDINGS = 2.0, 32.0
SAME = 0.01  # relative difference of the residuals at the start that shows another function

_COUNTS: WeakKeyDictionary[object, list[int]] = WeakKeyDictionary()
# By the code of functions that are no modules: what the latest of them has captured, and its count.
_LATEST: WeakKeyDictionary[CodeType, tuple[list[Any], list[int]]] = WeakKeyDictionary()


def count_solve(f: object) -> int:
    """Return how many solves of ``f`` there have been before this one.

    A function that is made anew for every call goes on counting, as long as it captures the same modules and
    functions. The tensors and numbers that it captures may differ.
    """
    origin = origin_of(f)
    try:
        if not isinstance(origin, CodeType):
            count = _COUNTS.setdefault(f if origin is None else origin, [0])
        else:
            count = _COUNTS.get(f)
            if count is None:
                captured = [ref(each) for each in _captured(f)]
                known, count = _LATEST.get(origin, (None, [0]))
                if known is None or [r() for r in known] != [r() for r in captured]:
                    count = [0]
                _LATEST[origin] = captured, count
                _COUNTS[f] = count
    except (TypeError, ValueError):  # no weak references, or an empty cell of a closure
        return 0
    count[0] += 1
    return count[0] - 1


def _captured(f: Any) -> list[Any]:
    """Return the callables that a function captures, and the object of a bound method."""
    captured: list[Any] = []
    while isinstance(f, partial):
        captured += [*f.args, *f.keywords.values()]
        f = f.func
    captured += [cell.cell_contents for cell in getattr(f, "__closure__", None) or ()]
    captured += getattr(f, "__defaults__", None) or ()
    own = getattr(f, "__self__", None)
    return [each for each in captured if callable(each)] + ([] if own is None else [own])


def due(number: int, wanted: bool | None) -> bool:
    """Whether to evaluate again after so many solves, unless it is ``wanted`` or not."""
    return (number < ALWAYS or number % EVERY == EVERY - 1) if wanted is None else wanted


def exceeds(
    norm: Tensor, allowed: Tensor | float, reference: Tensor, precision: torch.dtype
) -> Tensor:
    """(B,) bool: residual norms that are above what is ``allowed`` by more than rounding explains."""
    roundings = 2.0 if precision in HALF else ROUNDINGS
    return ~(norm <= SLACK * allowed + roundings * torch.finfo(precision).eps * reference)


def judge_again(
    solution: Solution,
    point: Point,
    tolerance: Tolerance,
    precision: torch.dtype,
    among: Tensor | None = None,
    *,
    converged: bool = False,
) -> None:
    """Put the residuals of ``point``, an evaluation at the returned value, into ``solution``.

    A sample that had converged by the residual that was measured, and has not by this one, becomes
    INCONSISTENT.

    Args:
        among: (B,) bool, samples that ``point`` is about; None: all.
        converged: ``point`` is at the returned value where a sample has converged, and only there.
    """
    norm, reference = point.norm, point.reference
    wrong = exceeds(norm, tolerance.threshold(reference), reference, precision)
    relative = point.relative().clamp_max(torch.finfo(norm.dtype).max)
    known = solution.status == Status.CONVERGED
    # A sample without a finite evaluation keeps its infinite residual.
    finite = point.finite() & (solution.residual < torch.inf)
    if converged:
        finite = finite & known
    if among is not None:
        finite, known = finite & among, known & among
    solution.status = torch.where(wrong & known, int(Status.INCONSISTENT), solution.status)
    for name, new in (("residual", relative), ("residual_norm", norm)):
        old = getattr(solution, name)
        setattr(solution, name, torch.where(finite, new.to(old.dtype), old))


def refuse_change(
    solution: Solution, evaluate: Callable[[], Point], first: Tensor, precision: torch.dtype
) -> None:
    """INCONSISTENT where ``f`` has another residual at the start than in its ``first`` call, (B,)."""
    again, eps = evaluate(), torch.finfo(precision).eps
    changed = (again.norm - first).abs() > SAME * first + ROUNDINGS * eps * again.reference
    if bool(changed.any()):
        converged = solution.status == Status.CONVERGED
        solution.status = torch.where(converged, int(Status.INCONSISTENT), solution.status)

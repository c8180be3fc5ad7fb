"""Linear systems by GMRES or conjugate gradients in the engine; see ``systems.h``.

The engine decides as :class:`solvers.krylov.loop.LinearLoop` does; here the matrix is multiplied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from solvers.core.solution import Solution
from solvers.core.tolerance import Tolerance
from solvers.native.library import THREADS, alike, engine, fields, function, pieces
from solvers.native.turns import MOST

# Right-hand sides of norms between 1 / MODERATE and MODERATE are taken: the square of a residual that is
# smaller by all digits of the dtype is still a number.
MODERATE = {torch.float32: 1e10, torch.float64: 1e100}
LARGEST = 1 << 24  # numbers
FLOOR = 16  # times the machine precision and |H|: a smaller column ends a Krylov space
# Rounding moves the residual of a recurrence away from the true one by at most about
# GAP eps (|A| |x| + |b|), ten times the largest gap that was measured.
GAP = 40.0
RESERVE = 1e-3  # a step is expected to leave more than this of the residual
# A cycle that converged by its recurrence but did not halve the true residual: rounding limits it.
HALVED = 0.5


class _Record(ctypes.Structure):
    """``Systems`` of ``systems.h``."""

    _fields_ = fields(
        "right product direction u residual correction reference norm target left matrix_norm "
        "basis hessenberg rotation null beta iterate square best_square curvature "
        "status steps products used columns verdict running broken fork",
        "threads rows size capacity step max_steps one_minus",
        "rtol atol moderate gap halved less reserve floor tiny",
    )


def fits(right: Tensor, restart: int | None) -> bool:
    """Whether the arrays of a whole cycle may be asked for at once; what no step uses of them costs nothing.

    Beside the vectors there are two tables of numbers a sample, which count where samples are short.
    """
    if restart is None:
        return True
    rows, size = right.shape
    capacity = restart + 1
    return restart < MOST and rows * capacity * (size + 2 * (capacity + 1)) <= LARGEST


def solve_systems(
    matvec: Callable[[Tensor], Tensor],
    right: Tensor,
    restart: int | None,
    tolerance: Tolerance,
    max_steps: int,
    *,
    one_minus: bool,
) -> Solution | None:
    """``A u = right`` for all samples (B, D); None where a norm of ``right`` is not moderate.

    Args:
        matvec: of vectors (B, D): products with A, or with M of A = I - M where ``one_minus``.
        restart: steps of a cycle of GMRES; None: conjugate gradients.
    """
    right = alike(right, right, "b", "b")
    rows, size = right.shape
    capacity, state, dtype = 0 if restart is None else restart + 1, right.numel(), right.dtype
    table = rows * capacity * (capacity + 1)
    cycle = [state, rows, rows, rows] if restart is None else [
        state * capacity, table, table, rows * (capacity + 1), rows
    ]  # fmt: skip
    own, places = pieces(right, dtype, [state, state, *[rows] * 3, *cycle])
    residual, correction, target, left, matrix_norm, *method = places
    method = [None] * 5 + method if restart is None else [*method, *[None] * 4]
    direction, u = torch.empty_like(right), torch.empty_like(right)
    reference, norm = right.new_empty(2, rows).unbind()
    counts = right.new_empty(6, rows, dtype=torch.int64)
    status, steps, products = counts[:3].unbind()
    flags = right.new_empty(2, rows, dtype=torch.bool)
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    record = _Record(
        right.data_ptr(), None, direction.data_ptr(), u.data_ptr(), residual, correction,
        reference.data_ptr(), norm.data_ptr(), target, left, matrix_norm, *method,
        *map(Tensor.data_ptr, (*counts, *flags)), THREADS.fork,
        THREADS.number, rows, size, capacity, 0, max_steps, one_minus,
        tolerance.rtol, tolerance.atol, MODERATE[dtype], GAP * eps, HALVED, 1 - eps**0.5, RESERVE,
        FLOOR * eps, tiny,
    )  # fmt: skip
    of, names = engine(), ("begin", "advance", "settle", "verify")
    begin, advance, settle, verify = [function(of, name, dtype) for name in names]
    at = ctypes.addressof(record)

    def multiply() -> Tensor:
        # A hook in the user's map may keep what it is given, and the next direction comes in its place.
        image = alike(matvec(direction.clone()), right, "a product", "its vector")
        record.product = image.data_ptr()
        return image

    running = begin(at)
    if running < 0:
        return None
    while running:
        record.step = 0
        while running and record.step != restart:
            image = multiply()
            running = advance(at)
            record.step += 1
        if not settle(at):
            break
        image = multiply()
        running = verify(at)
        del image
    del own, flags  # the engine had their addresses alone
    return Solution(
        value=u,
        status=status.clone(),
        residual=torch.where(norm == 0, norm, norm / reference),
        residual_norm=norm,
        steps=steps.clone(),
        evaluations=products.clone(),
    )

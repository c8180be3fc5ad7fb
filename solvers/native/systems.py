"""Linear systems solved by GMRES or conjugate gradients in C++, verified by a product; see ``systems.h``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.native import spare
from solvers.native.process import THREADS
from solvers.native.steps import MOST, Conjugate, Cycle, Steps, SystemsRecord, number

SOLVED, GOES_ON = 0, 1  # outcomes of a cycle, as ``systems.h`` knows
# Right-hand sides of norms between 1 / MODERATE and MODERATE are taken: the square of a residual that is
# smaller by all digits of the dtype is still a number.
MODERATE = {torch.float32: 1e10, torch.float64: 1e100}
LARGEST = 1 << 24  # numbers
FLOOR = 16  # times the machine precision and |H|: a smaller column ends a Krylov space


@dataclass(frozen=True)
class Limits:
    """When a system is solved, and what a cycle has to gain.

    ``rtol`` and ``atol`` are numbers or (B,), the first relative to the right-hand side. ``gap`` bounds what
    rounding does to a residual, in units of the machine precision. A cycle that has reached its target by its
    own account makes the residual smaller by the factor ``halved`` at least. ``trusting``: where a cycle's
    own account of the residual is accurate, it is believed.
    """

    rtol: float | Tensor
    atol: float | Tensor
    gap: float
    halved: float
    trusting: bool = False


def fits(right: Tensor, restart: int | None) -> bool:
    """Whether the arrays of a whole cycle may be asked for at once; what no step uses of them costs nothing.

    Beside the vectors there are two tables of numbers a sample, which count where samples are short.
    """
    if restart is None:
        return True
    rows, size = right.shape
    capacity = restart + 1
    return restart < MOST and rows * capacity * (size + 2 * (capacity + 1)) <= LARGEST


class Systems:
    """``(I - M) u = right`` of all samples (B, D), whose products with M the caller makes.

    :attr:`direction` is to be multiplied while :attr:`running` samples go on and a cycle has steps left;
    :meth:`correct` ends the cycle, and :meth:`verify` takes the product with :attr:`u`.

    Args:
        right: right-hand sides (B, D), contiguous, on the CPU.
        restart: steps of a cycle of GMRES; None: conjugate gradients, whose cycles have no end of their own.

    Attributes:
        running: whether samples go on, > 0 if so; -1 where a norm of ``right`` is not moderate.
        step: steps made in this cycle.
        u, size, relative: (B, D) the iterate, (B,) norms of the verified residual, and relative to ``right``.
        steps, products: (B,) int64; the product that verifies counts where there was need of it.
    """

    def __init__(self, right: Tensor, restart: int | None, limits: Limits, steps: Steps) -> None:
        right = right.resolve_neg()  # of an imaginary part: C++ reads the numbers as they lie
        rows, size = right.shape
        self.right, self.restart, self.step, self._steps = right, restart, 0, steps
        self._kind = "systems", rows, size, restart, right.dtype
        self._own = spare.take(self._kind, lambda: _Memory(right, restart))
        self.direction = self._own.direction
        self.u = torch.empty_like(right)
        self._tolerances = [number(part, right) for part in (limits.rtol, limits.atol)]
        self._reference, self.size, self.relative = (right.new_empty((rows,)) for _ in range(3))
        self.steps = right.new_empty((rows,), dtype=torch.int64)
        self.products = torch.empty_like(self.steps)
        record, eps = self._own.record, torch.finfo(right.dtype).eps
        record.right, record.u = right.data_ptr(), self.u.data_ptr()
        record.reference, record.size = self._reference.data_ptr(), self.size.data_ptr()
        record.relative = self.relative.data_ptr()
        record.steps, record.products = self.steps.data_ptr(), self.products.data_ptr()
        record.rtol, record.atol = (part.data_ptr() for part in self._tolerances)
        record.each_rtol, record.each_atol = (part.dim() for part in self._tolerances)
        record.moderate, record.gap = MODERATE[right.dtype], limits.gap * eps
        record.halved, record.less, record.trusting = limits.halved, 1 - eps**0.5, limits.trusting
        cycle = self._cycle = record.cycle
        cycle.fork, cycle.threads, cycle.step = THREADS.fork, THREADS.number, 0
        self.running = steps.begin(self._own.at)

    def absorb(self, image: Tensor) -> None:
        """Take the product of M with the direction, and make the next one."""
        image = self._like_right(image)
        cycle = self._cycle
        cycle.product, cycle.step = image.data_ptr(), self.step
        self.step += 1
        self.running = self._steps.advance(self._own.at)

    def correct(self) -> Tensor:
        """``u`` at the end of a cycle."""
        self._cycle.step = self.step
        self._steps.correct(self._own.at)
        return self.u

    def settled(self) -> bool:
        """Whether all are solved by the cycle's own account, so that no product verifies it."""
        return bool(self._steps.settled(self._own.at))

    def verify(self, image: Tensor) -> int:
        """Take the product of M with ``u``: whether all are SOLVED, or a further cycle GOES_ON."""
        image = self._like_right(image)
        outcome = self._steps.verify(self._own.at, image.data_ptr())
        self.step, self.running = 0, int(outcome != SOLVED)
        return outcome

    def close(self) -> None:
        """Leave the memory to the next systems of this kind."""
        spare.give_back(self._kind, self._own, self._own.numbers)

    def _like_right(self, image: Tensor) -> Tensor:
        image, right = image.contiguous().resolve_neg(), self.right
        if image.shape != right.shape or image.dtype != right.dtype:  # C++ would not ask
            wanted, got = (f"{tuple(t.shape)} {t.dtype}" for t in (right, image))
            raise ValueError(f"a product must be like its vector, {wanted}, got {got}")
        return image


class _Memory:
    """What no caller sees of the systems, and the record with its places."""

    def __init__(self, like: Tensor, restart: int | None) -> None:
        rows, size = like.shape
        capacity = 0 if restart is None else restart + 1
        self.direction = torch.empty_like(like)
        table, state = rows * capacity * (capacity + 1), rows * size
        sizes = [state, *[rows] * 5]
        sizes += [state, state, *[rows] * 4] if restart is None else []
        sizes += [state * capacity, table, table, rows * (capacity + 1), rows] if capacity else []
        self.memory, places = spare.pieces(like, sizes)
        self.counts = like.new_empty((2, rows), dtype=torch.int64)
        self.flags = like.new_empty((3, rows), dtype=torch.bool)
        columns, used = (part.data_ptr() for part in self.counts)
        running, broken, opened = (part.data_ptr() for part in self.flags)
        residual, residual_norm, matrix_norm, target, left, before, *own = places
        at, beta = self.direction.data_ptr(), own[-1]
        arrays = own[:4] if capacity else [None] * 4
        precision = torch.finfo(like.dtype)
        cycle = Cycle(
            None, at, at, *arrays, residual_norm, matrix_norm, target, beta,
            running, broken, columns, used, None,
            1, rows, size, capacity, 0, True, FLOOR * precision.eps, precision.tiny,
        )  # fmt: skip
        record = self.record = SystemsRecord(cycle)
        if restart is None:
            record.conjugate = Conjugate(*own)
        record.residual, record.target, record.beta = residual, target, beta
        record.left, record.before, record.open = left, before, opened
        self.at, self.numbers = ctypes.addressof(record), sum(sizes)

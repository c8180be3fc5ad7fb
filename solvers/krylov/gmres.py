"""Generalised minimal residuals, for any matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from solvers.core.arrays import (
    Array,
    combine_all,
    fits_numpy,
    inner_products_of,
    row_dots,
)
from solvers.core.checks import require_count
from solvers.core.device import traced
from solvers.core.guards.native import native_steps
from solvers.core.solution import Status
from solvers.krylov.in_native import Cycles
from solvers.krylov.method import KrylovRun, LinearSolver, norm
from solvers.native.steps import MOST, Steps

_FIRST_CAPACITY = 8  # basis vectors allocated at first; doubled whenever they are used up
# ... but all for a whole cycle of so few steps and numbers.
_SHORT, _SMALL = 24, 1 << 18


@dataclass(frozen=True)
class GMRES(LinearSolver):
    """Restarted GMRES(m), for any matrix; the residual never rises.

    The Arnoldi process gives ``A V_k = V_{k+1} H`` with orthonormal ``V``, by classical Gram-Schmidt
    with reorthogonalisation (two pairs of batched matrix products a step). The iterate is ``V_k y``
    where ``y`` minimises ``|beta e_1 - H y|``, ``beta`` the norm of the first residual. Memory grows
    with the steps made, up to ``restart + 1`` vectors.
    After ``restart`` steps the method starts again from the true residual, computed by one product.
    A sample whose residual a whole cycle did not lower ends with ``Status.STALLED``.

    Args:
        restart: steps per cycle, an integer >= 1.

    Source: Saad and Schultz (1986), "GMRES: a generalized minimal residual algorithm for solving
    nonsymmetric linear systems", https://doi.org/10.1137/0907058.
    """

    restart: int = 20

    def __post_init__(self) -> None:
        require_count("restart", self.restart)

    def start(self, residual: Tensor, limit: Tensor, active: Tensor) -> GMRESRun:
        return GMRESRun(residual, limit, active, self.restart)


class GMRESRun(KrylovRun):
    """One cycle.

    The rotations that make ``H`` triangular are kept as their product, the orthogonal factor. Its
    row j is ``(c_j u, s_j)``, where ``u`` is the left null vector of the first j - 1 columns, and
    ``c_j``, ``s_j`` rotate the last two entries of the new column into one. Then ``u`` becomes
    ``(-s_j u, c_j)``. Each step multiplies the residual norm by ``s_j``.

    ``basis`` is ``V``, (n, capacity, D). The rows of ``hessenberg`` are the columns of ``H``, those of
    ``rotation`` the rows of the orthogonal factor, ``null`` is ``u``. ``columns`` counts the finite
    columns of ``H``; ``broken`` marks rows whose Krylov space is exhausted.
    """

    def __init__(self, residual: Tensor, limit: Tensor, active: Tensor, restart: int) -> None:
        super().__init__(residual, limit, active)
        arrays, rows = self.arrays, residual.shape[0]
        whole = restart <= _SHORT and (restart + 1) * residual.numel() <= _SMALL
        capacity = restart + 1 if whole else min(restart + 1, _FIRST_CAPACITY)
        length = norm(residual)
        self.restart, self.step = restart, 0
        self.beta = self.residual_norm = arrays.read(length)
        self.columns = self.used
        self.broken: Array = self.running & False
        self.in_numpy = arrays.host and fits_numpy(residual)
        self.matmul = numpy.matmul if self.in_numpy else torch.matmul
        if not (arrays.host and self.beta.all()):
            length = torch.where(length > 0, length, 1)
        self.direction = (residual / length).contiguous()  # C++ reads it row by row
        # A program keeps the vectors apart: to write one into an array it would copy the array.
        self.vectors: list[Tensor] | None = [self.direction] if traced() else None
        self.native = None
        if self.vectors is None and arrays.host and restart < MOST:
            self.native = native_steps(residual)
        width = 0 if self.vectors else residual.shape[1]
        self.basis = self._vectors(residual.new_empty(rows, capacity, width))
        if self.vectors is None:
            self.basis[:, 0] = self._vectors(self.direction)
        # C++ reads nothing that it has not written.
        new = residual.new_zeros if self.native is None else residual.new_empty
        self.hessenberg = arrays.read(new(rows, capacity, capacity + 1))
        self.rotation = arrays.read(new(rows, capacity, capacity + 1))
        self.null = arrays.read(residual.new_zeros(rows, capacity + 1))
        self.null[:, 0] = 1
        precision = torch.finfo(residual.dtype)
        self.floor, self.tiny = 16 * precision.eps, precision.tiny
        self.cycles = Cycles()
        if self.native is not None:
            self._own_arrays()

    def _own_arrays(self) -> None:
        """Arrays that a step in C++ may write to."""
        for name in ("residual_norm", "matrix_norm", "broken", "columns", "used"):
            setattr(self, name, getattr(self, name).copy())

    def _vectors(self, tensor: Tensor) -> Array:
        """Basis vectors in NumPy or torch, whichever multiplies them faster; without a copy."""
        return tensor.numpy() if self.in_numpy else tensor

    def _tensor(self, vectors: Array) -> Tensor:
        return torch.from_numpy(vectors) if self.in_numpy else vectors

    def absorb_image(self, image: Tensor) -> None:
        if self.native is None:
            return super().absorb_image(image)
        self._grow_if_full()
        self._advance_in_native(self.native, image, of_one_minus=True)

    def _grow_if_full(self) -> None:
        if self.step + 1 >= self.basis.shape[1]:
            self._grow()

    def _advance(self, product: Tensor) -> None:
        step = self.step
        self._grow_if_full()
        if self.native is not None:
            return self._advance_in_native(self.native, product, of_one_minus=False)
        self.used = self.used + self.running
        if self.in_numpy:
            return self._advance_in_numpy(product.numpy())
        entries, rest = self._orthogonal(product)
        below = norm(rest)
        self.direction = rest / below.clamp_min(self.tiny)
        if self.vectors is None:
            self.basis[:, step + 1] = self.direction
        else:
            self.vectors.append(self.direction)
        read = self.arrays.read
        self._extend(read(entries), read(below))
        self.step = step + 1
        self.exhausted = self.step == self.restart

    def _orthogonal(self, product: Tensor) -> tuple[Tensor, Tensor]:
        """(n, k + 1) inner products of ``product`` with the basis, and what is left of it."""
        if self.vectors is not None:
            first = inner_products_of(self.vectors, product)
            product = combine_all(product, first, self.vectors, sign=-1)
            second = inner_products_of(self.vectors, product)
            return first + second, combine_all(product, second, self.vectors, sign=-1)
        basis = self.basis[:, : self.step + 1]
        first = basis @ product[:, :, None]
        product = product - (first.mT @ basis)[:, 0]
        second = basis @ product[:, :, None]
        return (first + second)[:, :, 0], product - (second.mT @ basis)[:, 0]

    def _advance_in_numpy(self, product: Array) -> None:
        """The same with fewer calls: at few samples a call costs more than its numbers."""
        step, matmul = self.step, numpy.matmul
        basis = self.basis[:, : step + 1]
        column = self.hessenberg[:, step, : step + 2]
        first = matmul(basis, product[:, :, None])
        rest = product - matmul(first.swapaxes(1, 2), basis)[:, 0]
        second = matmul(basis, rest[:, :, None])
        rest -= matmul(second.swapaxes(1, 2), basis)[:, 0]
        numpy.add(first[:, :, 0], second[:, :, 0], out=column[:, :-1])
        below = numpy.sqrt(row_dots(rest, rest))
        column[:, -1] = below
        direction = self.basis[:, step + 1]
        rest /= numpy.maximum(below, self.tiny)[:, None]
        direction[...] = rest
        self.direction = torch.from_numpy(rest)
        if not self._all_extend(column, below[:, None]):
            self._extend(column[:, :-1], below[:, None])
        self.step = step + 1
        self.exhausted = self.step == self.restart

    def _advance_in_native(self, steps: Steps, product: Tensor, *, of_one_minus: bool) -> None:
        """The same in C++."""
        self.direction = self.cycles.absorb(self, steps, product.contiguous(), of_one_minus)
        self.step += 1
        self.exhausted = self.step == self.restart

    def _all_extend(self, column: Array, below: Array) -> bool:
        """:meth:`_extend` where every row runs and is finite, else False: nothing is to be chosen."""
        size = numpy.sqrt(row_dots(column, column))[:, None]
        if not (self.running.all() and size.max() < numpy.inf):  # False for NaN
            return False
        step = self.step
        self.matrix_norm = size = numpy.maximum(self.matrix_norm, size)
        self.broken = below <= self.floor * size
        null, rotation = self.null[:, : step + 1], self.rotation[:, step]
        projection = row_dots(null, column[:, :-1])[:, None]
        positive = below + self.tiny
        pivot = numpy.hypot(projection, positive)
        cosine, sine = projection / pivot, positive / pivot
        numpy.multiply(null, cosine, out=rotation[:, : step + 1])
        rotation[:, step + 1 : step + 2] = sine
        null *= -sine
        self.null[:, step + 1 : step + 2] = cosine
        self.residual_norm = sine * self.residual_norm
        self.columns = self.columns + 1
        self.running = self.residual_norm > self.limit
        self.running &= ~self.broken
        return True

    def _extend(self, entries: Array, below: Array) -> None:
        """Append a column to H and rotate it; stop rows that have converged or broken down."""
        xp, running, step = self.arrays.xp, self.running, self.step
        size = xp.sqrt((entries * entries).sum(axis=1, keepdims=True) + below * below)
        good = running & (size < xp.inf)
        size = xp.maximum(self.matrix_norm, size)
        self.matrix_norm = xp.where(good, size, self.matrix_norm)
        self.broken = xp.where(good, below <= self.floor * size, self.broken)
        null = self.null[:, : step + 1]
        projection = (null * entries).sum(axis=1, keepdims=True)
        positive = below + self.tiny
        pivot = xp.hypot(projection, positive)
        cosine, sine = projection / pivot, positive / pivot
        self.hessenberg[:, step, : step + 1] = entries
        self.hessenberg[:, step, step + 1 : step + 2] = below
        self.rotation[:, step, : step + 1] = cosine * null
        self.rotation[:, step, step + 1 : step + 2] = sine
        self.null[:, : step + 1] = -sine * null
        self.null[:, step + 1 : step + 2] = cosine
        self.residual_norm = xp.where(good, sine * self.residual_norm, self.residual_norm)
        self.columns = self.columns + good
        self.running = good & (self.residual_norm > self.limit) & ~self.broken

    def _grow(self) -> None:
        """Double the capacity, at most to that of a whole cycle."""
        rows, old, width = self.basis.shape
        more = min(old, self.restart + 1 - old)
        basis = self._vectors(self.direction.new_empty(rows, old + more, width))
        basis[:, :old] = self.basis
        self.basis = basis
        for name in ("hessenberg", "rotation", "null"):
            array = self.arrays.write(getattr(self, name))
            padded = F.pad(array, (0, more) * (array.dim() - 1))
            setattr(self, name, self.arrays.read(padded))

    def solution(self) -> Tensor:
        return self.final()[0]

    def final(self) -> tuple[Tensor, Array]:
        step = self.step
        if step == 0:
            return torch.zeros_like(self.direction), self.residual_norm
        if self.native is not None:
            return self.cycles.finish(self, self.native)
        xp, write = self.arrays.xp, self.arrays.write
        entries = self.hessenberg[:, :step, : step + 1]
        rotation = self.rotation[:, :step, : step + 1]
        basis: Any = self.basis[:, :step] if self.vectors is None else self.vectors[:step]
        # Columns added after a row had stopped are left out; they may be NaN.
        mask = (self.arrays.range(step) < self.columns)[:, :, None]
        if not (self.arrays.host and mask.all()):
            entries, rotation = xp.where(mask, entries, 0), xp.where(mask, rotation, 0)
        if self.vectors is not None:
            basis = [torch.where(m, v, 0) for m, v in zip(mask.unbind(1), basis, strict=True)]
        elif not (self.arrays.host and (self.columns == self.used).all()):
            basis = self._vectors(torch.where(write(mask), self._tensor(basis), 0))
        triangle = write(xp.matmul(rotation, entries.swapaxes(1, 2)))
        diagonal = triangle.diagonal(dim1=1, dim2=2)
        usable = diagonal.abs() > write(self.floor * self.matrix_norm)
        target = write(self.beta * rotation[:, :, 0]) * usable
        diagonal.copy_(torch.where(usable, diagonal, 1))
        weights = torch.linalg.solve_triangular(triangle, target.unsqueeze(2), upper=True)
        if self.vectors is not None:
            solution = combine_all(torch.zeros_like(basis[0]), weights[:, :, 0], basis)
        else:
            solution = self._tensor(self.matmul(self._vectors(weights.mT), basis)[:, 0])
        if self.arrays.host and not self.broken.any():
            return solution, self.residual_norm
        return solution, xp.where(self.broken, self._left(weights, entries), self.residual_norm)

    def _left(self, weights: Tensor, entries: Array) -> Array:
        """(n, 1): ``|beta e_1 - H y|`` of weights y (n, k, 1) that leave columns of H out.

        The recurrence counts them in.
        """
        left = -self.arrays.xp.matmul(self.arrays.read(weights.mT), entries)[:, 0]
        left[:, :1] += self.beta
        return self.arrays.xp.sqrt((left * left).sum(axis=1, keepdims=True))

    def verdict(self) -> Array:
        where = self.arrays.xp.where
        verdict = where(self.broken, int(Status.STALLED), int(Status.MAX_STEPS))
        verdict = where(self.columns < self.used, int(Status.NONFINITE), verdict)
        return where(self.residual_norm <= self.limit, int(Status.CONVERGED), verdict)

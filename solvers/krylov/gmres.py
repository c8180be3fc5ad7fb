"""Generalised minimal residuals, for any matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from solvers.core.arrays import Array
from solvers.core.checks import require_count
from solvers.core.solution import Status
from solvers.krylov.method import KrylovRun, LinearSolver, norm

_FIRST_CAPACITY = 8  # basis vectors allocated at first; doubled whenever they are used up
# Up to this many numbers in a batch of vectors NumPy's batched products beat those of torch, whose
# threads cost more than they bring (and stall where other processes want the cores).
_NUMPY_SIZE = 2**17


@dataclass(frozen=True)
class GMRES(LinearSolver):
    """Restarted GMRES(m), for any matrix; the residual never rises.

    Arnoldi's process gives ``A V_k = V_{k+1} H`` with orthonormal ``V``, by classical Gram-Schmidt
    done twice (two pairs of batched matrix products a step); the iterate is ``V_k y`` with
    ``|beta e_1 - H y|`` least. Memory grows with the steps made, up to ``restart + 1`` vectors.
    After ``restart`` steps the residual is computed anew, by one product, and a new basis begun; a
    sample whose residual a whole cycle did not lower ends with ``Status.STALLED``.

    Args:
        restart: steps per cycle, an integer >= 1.

    Reference: Saad and Schultz, "GMRES: a generalized minimal residual algorithm for solving
    nonsymmetric linear systems" (SIAM J. Sci. Stat. Comput. 7, 1986).
    """

    restart: int = 20

    def __post_init__(self) -> None:
        require_count("restart", self.restart)

    def start(self, residual: Tensor, limit: Tensor, active: Tensor) -> GMRESRun:
        return GMRESRun(residual, limit, active, self.restart)


class GMRESRun(KrylovRun):
    """One cycle.

    The rotations that make ``H`` triangular are kept as their product: row j of the orthogonal
    factor is ``(c_j u_1..j, s_j)``, where ``u`` is the left null vector of the first j - 1 columns,
    ``c_j`` and ``s_j`` rotate the new column's last two entries into one, and ``u`` becomes
    ``(-s_j u, c_j)``. The residual norm shrinks by ``s_j`` a step.
    """

    def __init__(self, residual: Tensor, limit: Tensor, active: Tensor, restart: int) -> None:
        super().__init__(residual, limit, active)
        arrays, rows = self.arrays, residual.shape[0]
        capacity = min(restart + 1, _FIRST_CAPACITY)
        length = norm(residual)
        self.restart, self.step = restart, 0
        self.beta = self.norm = arrays.read(length)
        self.columns = self.used  # columns of H that are finite
        self.broken = self.running & False
        self.in_numpy = arrays.host and residual.numel() <= _NUMPY_SIZE
        self.direction = residual / torch.where(length > 0, length, 1)
        self.basis = self._wide(residual.new_empty(rows, capacity, residual.shape[1]))
        self.basis[:, 0] = self._wide(self.direction)
        self.hessenberg = arrays.read(residual.new_zeros(rows, capacity, capacity + 1))
        self.rotation = arrays.read(residual.new_zeros(rows, capacity, capacity + 1))
        self.null = arrays.read(residual.new_zeros(rows, capacity + 1))
        self.null[:, 0] = 1
        precision = torch.finfo(residual.dtype)
        self.floor, self.tiny = 16 * precision.eps, precision.tiny

    def _wide(self, tensor: Tensor) -> Array:
        """A tensor of basis vectors in the form that Gram-Schmidt works on, without a copy."""
        return tensor.numpy() if self.in_numpy else tensor

    def _tensor(self, wide: Array) -> Tensor:
        return torch.from_numpy(wide) if self.in_numpy else wide

    def _advance(self, product: Tensor) -> None:
        self.used = self.used + self.running
        step = self.step
        if step + 1 >= self.basis.shape[1]:
            self._grow()
        matmul = numpy.matmul if self.in_numpy else torch.matmul
        basis, vector = self.basis[:, : step + 1], self._wide(product)
        first = matmul(basis, vector[:, :, None])
        vector = vector - matmul(first.swapaxes(1, 2), basis)[:, 0]
        second = matmul(basis, vector[:, :, None])
        rest = self._tensor(vector - matmul(second.swapaxes(1, 2), basis)[:, 0])
        below = norm(rest)
        self.direction = rest / below.clamp_min(self.tiny)
        self.basis[:, step + 1] = self._wide(self.direction)
        entries = self.arrays.read(self._tensor((first + second)[:, :, 0]))
        self._extend(entries, self.arrays.read(below))
        self.step = step + 1
        self.exhausted = self.step == self.restart

    def _extend(self, entries: Array, below: Array) -> None:
        """Rotate a new column of H; stop the rows that have converged or broken down."""
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
        self.norm = xp.where(good, sine * self.norm, self.norm)
        self.columns = self.columns + good
        self.running = good & (self.norm > self.limit) & ~self.broken

    def _grow(self) -> None:
        rows, old, width = self.basis.shape
        capacity = min(2 * old, self.restart + 1)
        basis = self._wide(self.direction.new_empty(rows, capacity, width))
        basis[:, :old] = self.basis
        self.basis = basis
        for name in ("hessenberg", "rotation", "null"):
            self._enlarge(name, capacity)

    def _enlarge(self, name: str, capacity: int) -> None:
        """Zeros added to an array (n, a) or (n, a, b) up to ``capacity`` steps."""
        old = getattr(self, name)
        shape = (len(old), *([capacity] * (old.ndim - 2)), capacity + 1)
        new = self.arrays.read(self.direction.new_zeros(shape))
        if old.ndim == 2:
            new[:, : old.shape[1]] = old
        else:
            new[:, : old.shape[1], : old.shape[2]] = old
        setattr(self, name, new)

    def solution(self) -> Tensor:
        step = self.step
        if step == 0:
            return torch.zeros_like(self.direction)
        xp, write = self.arrays.xp, self.arrays.write
        entries = self.hessenberg[:, :step, : step + 1]
        rotation = self.rotation[:, :step, : step + 1]
        basis = self.basis[:, :step]
        # What a row did after it had stopped does not count; it is NaN where a product was.
        mask = (self.arrays.range(step) < self.columns)[:, :, None]
        if not (self.arrays.host and mask.all()):
            entries, rotation = xp.where(mask, entries, 0), xp.where(mask, rotation, 0)
        if not (self.arrays.host and (self.columns == self.used).all()):
            basis = self._wide(torch.where(write(mask), self._tensor(basis), 0))
        triangle = write(xp.matmul(rotation, entries.swapaxes(1, 2)))
        diagonal = triangle.diagonal(dim1=1, dim2=2)
        usable = diagonal.abs() > write(self.floor * self.matrix_norm)
        target = write(self.beta * rotation[:, :, 0]) * usable
        diagonal.copy_(torch.where(usable, diagonal, 1))
        weights = torch.linalg.solve_triangular(triangle, target.unsqueeze(2), upper=True)
        across = self._wide(weights.transpose(1, 2))
        matmul = numpy.matmul if self.in_numpy else torch.matmul
        return self._tensor(matmul(across, basis)[:, 0])

    def residual(self) -> Array:
        return self.norm

    def reliable(self) -> Array:
        return ~self.broken

    def verdict(self) -> Array:
        where = self.arrays.xp.where
        verdict = where(self.broken, int(Status.STALLED), int(Status.MAX_STEPS))
        verdict = where(self.columns < self.used, int(Status.NONFINITE), verdict)
        return where(self.norm <= self.limit, int(Status.CONVERGED), verdict)

    def quiet(self) -> None:
        self.direction = torch.where(self.active, self.direction, 0)

"""Generalised minimal residuals, for any matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from solvers.core.checks import require_count
from solvers.core.device import maybe_any, surely_all
from solvers.core.solution import Status
from solvers.krylov.method import KrylovRun, LinearSolver, norm
from solvers.native.systems import FLOOR

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
        rows, size = residual.shape
        whole = restart <= _SHORT and (restart + 1) * residual.numel() <= _SMALL
        capacity = restart + 1 if whole else min(restart + 1, _FIRST_CAPACITY)
        self.restart, self.step = restart, 0
        self.beta = self.residual_norm = length = norm(residual)
        self.columns, self.broken = self.used, torch.zeros_like(active)
        self.direction = residual / torch.where(length > 0, length, 1)
        self.basis = residual.new_empty(rows, capacity, size)
        self.basis[:, 0] = self.direction
        self.hessenberg = residual.new_zeros(rows, capacity, capacity + 1)
        self.rotation = residual.new_zeros(rows, capacity, capacity + 1)
        self.null = residual.new_zeros(rows, capacity + 1)
        self.null[:, 0] = 1
        precision = torch.finfo(residual.dtype)
        self.floor, self.tiny = FLOOR * precision.eps, precision.tiny

    def absorb(self, product: Tensor) -> None:
        step = self.step
        if step + 1 >= self.basis.shape[1]:
            self._grow()
        self.used = self.used + self.running
        basis = self.basis[:, : step + 1]
        first = basis @ product[:, :, None]
        rest = product - (first.mT @ basis)[:, 0]
        second = basis @ rest[:, :, None]
        rest = rest - (second.mT @ basis)[:, 0]
        below = norm(rest)
        self.basis[:, step + 1] = self.direction = rest / below.clamp_min(self.tiny)
        self._extend((first + second)[:, :, 0], below)
        self.step = step + 1
        self.exhausted = self.step == self.restart

    def _extend(self, entries: Tensor, below: Tensor) -> None:
        """Append a column to H and rotate it; stop rows that have converged or broken down."""
        running, step = self.running, self.step
        size = torch.sqrt((entries * entries).sum(1, keepdim=True) + below * below)
        good = running & (size < torch.inf)
        size = torch.maximum(self.matrix_norm, size)
        self.matrix_norm = torch.where(good, size, self.matrix_norm)
        self.broken = torch.where(good, below <= self.floor * size, self.broken)
        null = self.null[:, : step + 1]
        projection = (null * entries).sum(1, keepdim=True)
        positive = below + self.tiny
        pivot = torch.hypot(projection, positive)
        cosine, sine = projection / pivot, positive / pivot
        self.hessenberg[:, step, : step + 1] = entries
        self.hessenberg[:, step, step + 1 : step + 2] = below
        self.rotation[:, step, : step + 1] = cosine * null
        self.rotation[:, step, step + 1 : step + 2] = sine
        self.null[:, : step + 1] = -sine * null
        self.null[:, step + 1 : step + 2] = cosine
        self.residual_norm = torch.where(good, sine * self.residual_norm, self.residual_norm)
        self.columns = self.columns + good
        self.running = good & (self.residual_norm > self.limit) & ~self.broken

    def _grow(self) -> None:
        """Double the capacity, at most to that of a whole cycle."""
        more = min(self.basis.shape[1], self.restart + 1 - self.basis.shape[1])
        self.basis = F.pad(self.basis, (0, 0, 0, more))
        for name in ("hessenberg", "rotation", "null"):
            array = getattr(self, name)
            setattr(self, name, F.pad(array, (0, more) * (array.dim() - 1)))

    def solution(self) -> Tensor:
        return self.final()[0]

    def final(self) -> tuple[Tensor, Tensor]:
        step = self.step
        if step == 0:
            return torch.zeros_like(self.direction), self.residual_norm
        entries, basis = self.hessenberg[:, :step, : step + 1], self.basis[:, :step]
        rotation = self.rotation[:, :step, : step + 1]
        # Columns added after a row had stopped are left out; they may be NaN.
        mask = (torch.arange(step, device=basis.device) < self.columns)[:, :, None]
        if not surely_all(mask):
            entries, rotation = (torch.where(mask, each, 0) for each in (entries, rotation))
        if not surely_all(self.columns == self.used):
            basis = torch.where(mask, basis, 0)
        triangle = rotation @ entries.mT
        diagonal = triangle.diagonal(dim1=1, dim2=2)
        usable = diagonal.abs() > self.floor * self.matrix_norm
        target = self.beta * rotation[:, :, 0] * usable
        diagonal.copy_(torch.where(usable, diagonal, 1))
        weights = torch.linalg.solve_triangular(triangle, target.unsqueeze(2), upper=True)
        solution = (weights.mT @ basis)[:, 0]
        if not maybe_any(self.broken):
            return solution, self.residual_norm
        # The recurrence counts columns in that the weights leave out: |beta e_1 - H y|.
        left = -(weights.mT @ entries)[:, 0]
        left[:, :1] += self.beta
        return solution, torch.where(self.broken, norm(left), self.residual_norm)

    def verdict(self) -> Tensor:
        verdict = torch.where(self.broken, int(Status.STALLED), int(Status.MAX_STEPS))
        verdict = torch.where(self.columns < self.used, int(Status.NONFINITE), verdict)
        return torch.where(self.residual_norm <= self.limit, int(Status.CONVERGED), verdict)

"""Generalised minimal residuals, for any matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.krylov import KrylovRun, LinearSolver, norm
from solvers.solution import Status
from solvers.solver import require_count

_FIRST_CAPACITY = 8  # basis vectors allocated at first; doubled whenever they are used up


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

    The rotations of the usual formulation are not carried out step by step. Their product is known
    in closed form from the left null vector ``u`` of ``H`` (``u_1 = 1``, ``u^T H = 0``), which
    grows by one entry a step: the residual norm is ``beta / |u|``, and row j of the orthogonal
    factor is ``(c_j u_1..j / |u_1..j|, s_j)``, with ``s_j = |u_1..j| / |u_1..j+1|`` and
    ``c_j = -u_j+1 / |u_1..j+1|``.
    """

    def __init__(self, residual: Tensor, limit: Tensor, active: Tensor, restart: int) -> None:
        rows, capacity = residual.shape[0], min(restart + 1, _FIRST_CAPACITY)
        self.active, self.limit, self.restart = active, limit, restart
        self.products = torch.zeros_like(active, dtype=torch.int64)
        self.columns = torch.zeros_like(self.products)  # columns of H that are finite
        self.beta = self.norm = norm(residual)
        self.matrix_norm = torch.zeros_like(limit)
        self.broken = torch.zeros_like(active)
        self.basis = residual.new_zeros(rows, capacity, residual.shape[1])
        self.hessenberg = residual.new_zeros(rows, capacity, capacity)  # row j is column j of H
        self.null = residual.new_zeros(rows, capacity)
        self.null[:, 0] = 1
        self.square = torch.ones_like(limit)  # |u|^2
        inverse = torch.where(self.beta > 0, self.beta.reciprocal(), 0)
        self.direction = torch.mul(residual, inverse, out=self.basis[:, 0])
        precision = torch.finfo(residual.dtype)
        self.floor, self.tiny, self.huge = 16 * precision.eps, precision.tiny, 1e3 / precision.eps
        self.step = 0

    def absorb(self, product: Tensor) -> None:
        self.products += self.active
        step = self.step
        if step + 2 > self.basis.shape[1]:
            self._grow()
        basis = self.basis[:, : step + 1]
        across = basis.transpose(1, 2)
        vector = product.unsqueeze(1)
        first = torch.bmm(vector, across)
        vector = torch.baddbmm(vector, first, basis, alpha=-1)
        second = torch.bmm(vector, across)
        vector = torch.baddbmm(vector, second, basis, alpha=-1).squeeze(1)
        column = self.hessenberg[:, step]
        entries = torch.add(first, second, out=self.hessenberg[:, step : step + 1, : step + 1])
        below = norm(vector)
        column[:, step + 1 : step + 2] = below
        self.direction = torch.div(vector, below, out=self.basis[:, step + 1])
        self._update(entries.squeeze(1), below, norm(product))
        self.step = step + 1
        self.exhausted = self.step == self.restart

    def _update(self, entries: Tensor, below: Tensor, size: Tensor) -> None:
        """Extend the left null vector; stop rows that have converged or broken down."""
        step, running = self.step, self.active
        good = running & (size < torch.inf)
        size = torch.maximum(self.matrix_norm, size)
        self.matrix_norm = torch.where(good, size, self.matrix_norm)
        self.broken = torch.where(good, below <= self.floor * size, self.broken)
        projection = (entries * self.null[:, : step + 1]).sum(1, keepdim=True)
        entry = (projection / -below.clamp_min(self.tiny)).clamp(-self.huge, self.huge)
        self.null[:, step + 1 : step + 2] = entry
        self.square = torch.addcmul(self.square, entry, entry)
        self.norm = torch.where(good, self.beta * self.square.rsqrt(), self.norm)
        self.columns += good
        self.active = good & (self.norm > self.limit) & ~self.broken

    def _grow(self) -> None:
        old = self.basis.shape[1]
        capacity = min(2 * old, self.restart + 1)
        rows, _, width = self.basis.shape
        basis = self.basis.new_empty(rows, capacity, width)
        basis[:, :old] = self.basis
        hessenberg = self.basis.new_zeros(rows, capacity, capacity)
        hessenberg[:, :old, :old] = self.hessenberg
        null = self.basis.new_zeros(rows, capacity)
        null[:, :old] = self.null
        self.basis, self.hessenberg, self.null = basis, hessenberg, null

    def solution(self) -> Tensor:
        step = self.step
        if step == 0:
            return torch.zeros_like(self.basis[:, 0])
        kept = torch.arange(step + 1, device=self.basis.device) < self.columns + 1
        kept_columns = kept[:, 1:]
        null = torch.where(kept, self.null[:, : step + 1], 0)
        # What a stopped row did afterwards is masked: it may be NaN.
        entries = torch.where(kept_columns.unsqueeze(2), self.hessenberg[:, :step, : step + 1], 0)
        rotation = self._rotation(null)
        triangle = rotation @ entries.transpose(1, 2)
        diagonal = triangle.diagonal(dim1=1, dim2=2)
        usable = kept_columns & (diagonal.abs() > self.floor * self.matrix_norm)
        triangle.diagonal(dim1=1, dim2=2).copy_(torch.where(usable, diagonal, 1))
        target = torch.where(usable, self.beta * rotation[:, :, 0], 0).unsqueeze(2)
        weights = torch.linalg.solve_triangular(triangle, target, upper=True)
        basis = torch.where(kept[:, :-1].unsqueeze(2), self.basis[:, :step], 0)
        return torch.bmm(weights.transpose(1, 2), basis).squeeze(1)

    @staticmethod
    def _rotation(null: Tensor) -> Tensor:
        """First k rows of the orthogonal factor of H, (n, k, k + 1)."""
        lengths = null.square().cumsum(1).sqrt()
        before, after = lengths[:, :-1], lengths[:, 1:]
        cosine = -null[:, 1:] / after
        rotation = ((cosine / before).unsqueeze(2) * null.unsqueeze(1)).tril()
        rotation.diagonal(offset=1, dim1=1, dim2=2).copy_(before / after)
        return rotation

    def residual(self) -> Tensor:
        return self.norm

    def reliable(self) -> Tensor:
        return ~self.broken

    def verdict(self) -> Tensor:
        verdict = torch.full_like(self.products, Status.MAX_STEPS)
        verdict.masked_fill_(self.broken, Status.STALLED)
        verdict.masked_fill_(self.columns < self.products, Status.NONFINITE)
        return verdict.masked_fill_(self.norm <= self.limit, Status.CONVERGED)

    def quiet(self) -> None:
        self.direction = torch.where(self.active, self.direction, 0)

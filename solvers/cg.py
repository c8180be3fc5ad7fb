"""Conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.krylov import KrylovRun, LinearSolver, choose, dot
from solvers.solution import Status


@dataclass(frozen=True)
class CG(LinearSolver):
    """Conjugate gradients, for symmetric positive definite matrices.

    With residual ``r`` and direction ``p``: ``alpha = r.r / p.Ap``, ``x += alpha p``,
    ``r -= alpha Ap``, ``p = r' + (r'.r' / r.r) p``. Each step minimises the error in the norm of
    ``A``, not the residual, which may rise on the way: the iterate of the smallest residual is
    kept. Five vectors per sample.

    A direction with ``p.Ap <= 0`` ends the sample with ``Status.INDEFINITE``.

    Reference: Hestenes and Stiefel, "Methods of conjugate gradients for solving linear systems"
    (1952).
    """

    def start(self, residual: Tensor, limit: Tensor, active: Tensor) -> CGRun:
        return CGRun(residual, limit, active)


class CGRun(KrylovRun):
    """State of CG; ``square`` is ``r.r`` at the latest iterate, ``best_square`` at the best."""

    def __init__(self, residual: Tensor, limit: Tensor, active: Tensor) -> None:
        self.active = active
        self.products = torch.zeros_like(active, dtype=torch.int64)
        self.direction = residual
        self.remainder = residual
        self.iterate = self.best = torch.zeros_like(residual)
        self.square = self.best_square = dot(residual, residual)
        self.limit_square = limit * limit
        self.curvature = torch.ones_like(limit)
        self.matrix_norm = torch.zeros_like(limit)
        self._zero = torch.zeros_like(limit)

    def absorb(self, product: Tensor) -> None:
        self.products += self.active
        self.curvature = torch.where(self.active, dot(self.direction, product), self.curvature)
        active = self.active & (self.curvature > 0)
        # 1 / alpha never exceeds a diagonal entry of the Lanczos matrix, hence never |A|.
        inverse = self.curvature / self.square
        self.matrix_norm = torch.where(
            active, torch.maximum(self.matrix_norm, inverse), self.matrix_norm
        )
        alpha = torch.where(active, inverse.reciprocal(), self._zero)
        self.iterate = torch.addcmul(self.iterate, alpha, self.direction)
        self.remainder = torch.addcmul(self.remainder, alpha, product, value=-1)
        square = dot(self.remainder, self.remainder)
        better = active & (square < self.best_square)
        self.best = choose(better, self.iterate, self.best)
        self.best_square = torch.where(better, square, self.best_square)
        beta = torch.where(active, square / self.square, self._zero)
        self.direction = torch.addcmul(self.remainder, beta, self.direction)
        self.square = square
        self.active = active & (square > self.limit_square)

    def solution(self) -> Tensor:
        return self.best

    def residual(self) -> Tensor:
        return self.best_square.sqrt()

    def current(self) -> Tensor:
        return self.square.sqrt()

    def reliable(self) -> Tensor:
        return torch.ones_like(self.active)

    def verdict(self) -> Tensor:
        verdict = torch.full_like(self.products, Status.MAX_STEPS)
        verdict.masked_fill_(self.curvature <= 0, Status.INDEFINITE)
        finite = torch.isfinite(self.curvature) & torch.isfinite(self.square)
        verdict.masked_fill_(~finite, Status.NONFINITE)
        return verdict.masked_fill_(self.best_square <= self.limit_square, Status.CONVERGED)

    def quiet(self) -> None:
        self.direction = torch.where(self.active, self.direction, 0)
        self.remainder = torch.where(self.active, self.remainder, 0)

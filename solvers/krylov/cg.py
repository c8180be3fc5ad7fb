"""Conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.core.device import choose
from solvers.core.solution import Status
from solvers.krylov.method import KrylovRun, LinearSolver, dot


@dataclass(frozen=True)
class CG(LinearSolver):
    """Conjugate gradients, for symmetric positive definite matrices.

    With residual ``r`` and direction ``p``: ``alpha = r.r / p.Ap``, ``x += alpha p``,
    ``r -= alpha Ap``, ``p = r' + (r'.r' / r.r) p``. Each step minimises the error in the norm of
    ``A``, not the residual, which may rise in between: the iterate of the smallest residual is
    kept. Five vectors per sample.

    A direction with ``p.Ap <= 0`` ends the sample with ``Status.INDEFINITE``.

    Source: Hestenes and Stiefel (1952), "Methods of conjugate gradients for solving linear systems",
    https://doi.org/10.6028/jres.049.044.
    """

    def start(self, residual: Tensor, limit: Tensor, active: Tensor) -> CGRun:
        return CGRun(residual, limit, active)


class CGRun(KrylovRun):
    """State of CG; ``square`` is ``r.r`` at the latest iterate, ``best_square`` at the best."""

    recurrence = ("direction", "r")

    def __init__(self, residual: Tensor, limit: Tensor, active: Tensor) -> None:
        super().__init__(residual, limit, active)
        self.direction = self.r = residual
        self.iterate = self.best = torch.zeros_like(residual)
        self.square = self.best_square = dot(residual, residual)
        self.residual_norm = torch.sqrt(self.square)
        # Below it the residual is rounding, and the curvature of its directions may underflow.
        self.rounding = torch.finfo(residual.dtype).eps ** 2 * self.square
        self.limit_square = self.limit * self.limit
        self.curvature = self.zero + 1

    def absorb(self, product: Tensor) -> None:
        where = torch.where
        self.used = self.used + self.running
        curvature = dot(self.direction, product)
        self.curvature = where(self.running, curvature, self.curvature)
        active = self.running & (self.curvature > 0)
        # 1 / alpha never exceeds a diagonal entry of the Lanczos matrix, hence never |A|.
        inverse = self.curvature / self.square
        grown = active & (inverse > self.matrix_norm)
        self.matrix_norm = where(grown, inverse, self.matrix_norm)
        alpha = where(active, 1 / inverse, self.zero)
        self.iterate = torch.addcmul(self.iterate, alpha, self.direction)
        self.r = torch.addcmul(self.r, alpha, product, value=-1)
        square = dot(self.r, self.r)
        better = active & (square < self.best_square)
        self.best = choose(better, self.iterate, self.best)
        self.best_square = where(better, square, self.best_square)
        self.residual_norm = torch.sqrt(self.best_square)
        beta = where(active, square / self.square, self.zero)
        self.direction = torch.addcmul(self.r, beta, self.direction)
        self.square = square
        self.running = active & (square > self.limit_square)

    def solution(self) -> Tensor:
        return self.best

    def current(self) -> Tensor:
        return torch.sqrt(self.square)

    def verdict(self) -> Tensor:
        where, isfinite = torch.where, torch.isfinite
        finite = isfinite(self.curvature) & isfinite(self.square)
        verdict = where(self.curvature <= 0, int(Status.INDEFINITE), int(Status.MAX_STEPS))
        spent = (self.curvature <= 0) & (self.best_square <= self.rounding)
        verdict = where(spent, int(Status.STALLED), verdict)
        verdict = where(finite, verdict, int(Status.NONFINITE))
        return where(self.best_square <= self.limit_square, int(Status.CONVERGED), verdict)

"""Minimal residuals for symmetric matrices, definite or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.krylov import KrylovRun, LinearSolver, choose, dot, norm
from solvers.solution import Status


@dataclass(frozen=True)
class MINRES(LinearSolver):
    """Minimal residuals, for symmetric matrices, indefinite or singular ones included.

    The Lanczos process ``A v = beta' v' + alpha v + beta v_old`` builds an orthonormal basis of the
    Krylov space, Givens rotations solve the tridiagonal least-squares problem in it, and
    ``w = (v - delta w_1 - epsilon w_2) / gamma``, ``x += phi w``. The residual never rises. Six
    vectors per sample.

    The norm of the residual is known only while the Lanczos basis is orthonormal, which neither
    rounding nor a matrix that is not symmetric respects; so it is always checked by one more
    product, counted like the others, before it is reported.

    Where the system has no solution (``A r = 0`` to rounding, ``r`` above the tolerance) the sample
    ends with ``Status.STALLED`` at a least-squares solution.

    Reference: Paige and Saunders, "Solution of sparse indefinite systems of linear equations"
    (SIAM J. Numer. Anal. 12, 1975).
    """

    def start(self, residual: Tensor, limit: Tensor, active: Tensor) -> MINRESRun:
        return MINRESRun(residual, limit, active)


class MINRESRun(KrylovRun):
    """State of MINRES in the notation of Paige and Saunders; scalars are (n, 1)."""

    def __init__(self, residual: Tensor, limit: Tensor, active: Tensor) -> None:
        self.active = active
        self.products = torch.zeros_like(active, dtype=torch.int64)
        self.limit = limit
        self.phi_bar = norm(residual)
        self._zero = torch.zeros_like(limit)
        inverse = torch.where(self.phi_bar > 0, self.phi_bar.reciprocal(), self._zero)
        self.direction = residual * inverse
        self.old_direction = self.w = self.old_w = self.iterate = torch.zeros_like(residual)
        self.beta = self.delta_bar = self.epsilon = self.sine = self.matrix_norm = self._zero
        self.cosine = torch.full_like(limit, -1.0)
        self.gamma = torch.ones_like(limit)
        self.stuck = torch.zeros_like(active)
        self.floor = 16 * torch.finfo(residual.dtype).eps

    def absorb(self, product: Tensor) -> None:
        self.products += self.active
        v = self.direction
        alpha = dot(v, product)
        u = torch.addcmul(product, alpha, v, value=-1)
        u = torch.addcmul(u, self.beta, self.old_direction, value=-1)
        beta = norm(u)
        epsilon, delta, gamma_bar = self._rotate(alpha, beta)
        active = self._judge(alpha, beta, gamma_bar)
        self.cosine, self.sine = gamma_bar / self.gamma, beta / self.gamma
        w = torch.addcmul(v, delta, self.w, value=-1)
        w = torch.addcmul(w, epsilon, self.old_w, value=-1) / self.gamma
        step = torch.addcmul(self.iterate, self.cosine * self.phi_bar, w)
        self.iterate = choose(active, step, self.iterate)
        self.phi_bar = torch.where(active, self.sine * self.phi_bar, self.phi_bar)
        self.w, self.old_w = w, self.w
        self.direction, self.old_direction = u / beta, v
        self.beta = beta
        self.active = active & (self.phi_bar > self.limit)

    def _rotate(self, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the last rotation to the new column; epsilon, delta of this column, gamma_bar."""
        epsilon = self.epsilon
        delta = torch.addcmul(self.cosine * self.delta_bar, self.sine, alpha)
        gamma_bar = torch.addcmul(self.sine * self.delta_bar, self.cosine, alpha, value=-1)
        self.epsilon = self.sine * beta
        self.delta_bar = -self.cosine * beta
        return epsilon, delta, gamma_bar

    def _judge(self, alpha: Tensor, beta: Tensor, gamma_bar: Tensor) -> Tensor:
        """Rows that may take this step: finite, and with a residual that can still shrink."""
        running = self.active
        size = torch.maximum(self.matrix_norm, torch.hypot(alpha, beta))
        self.matrix_norm = torch.where(running, size, self.matrix_norm)
        self.gamma = torch.where(running, torch.hypot(gamma_bar, beta), self.gamma)
        # |A r| / |r| of the present iterate (Paige and Saunders, section 6).
        shrinking = torch.hypot(gamma_bar, self.delta_bar)
        self.stuck = torch.where(running, shrinking <= self.floor * size, self.stuck)
        return running & (self.gamma < torch.inf) & ~self.stuck

    def solution(self) -> Tensor:
        return self.iterate

    def residual(self) -> Tensor:
        return self.phi_bar

    def reliable(self) -> Tensor:
        return self.products == 0

    def verdict(self) -> Tensor:
        verdict = torch.full_like(self.products, Status.MAX_STEPS)
        verdict.masked_fill_(self.stuck, Status.STALLED)
        verdict.masked_fill_(~torch.isfinite(self.gamma), Status.NONFINITE)
        return verdict.masked_fill_(self.phi_bar <= self.limit, Status.CONVERGED)

    def quiet(self) -> None:
        for name in ("direction", "old_direction", "w", "old_w"):
            setattr(self, name, torch.where(self.active, getattr(self, name), 0))

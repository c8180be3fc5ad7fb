"""Minimal residuals for symmetric matrices, definite or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.core.device import choose, ratio
from solvers.core.solution import Status
from solvers.krylov.method import KrylovRun, LinearSolver, dot, norm


@dataclass(frozen=True)
class MINRES(LinearSolver):
    """Minimal residuals, for symmetric matrices, indefinite or singular ones included.

    The Lanczos process ``A v = beta' v' + alpha v + beta v_old`` builds an orthonormal basis of the
    Krylov space, Givens rotations solve the tridiagonal least-squares problem in it, and
    ``w = (v - delta w_1 - epsilon w_2) / gamma``, ``x += phi w``. The residual never rises. Six
    vectors per sample.

    The recurrence for the residual norm holds only while the Lanczos basis is orthonormal. Rounding
    and matrices that are not symmetric destroy that, so the norm is always verified by one more
    product, counted like the others, before it is reported.

    Where ``|A r|`` becomes small against ``|A| |r|`` the method is restarted from the true residual.
    If that lowers it no further, the sample ends with ``Status.STALLED``, at a least-squares
    solution if the system has no other.

    Source: Paige and Saunders (1975), "Solution of sparse indefinite systems of linear equations",
    https://doi.org/10.1137/0712047.
    """

    def start(self, residual: Tensor, limit: Tensor, active: Tensor) -> MINRESRun:
        return MINRESRun(residual, limit, active)


class MINRESRun(KrylovRun):
    """State of MINRES in the notation of Paige and Saunders, ``residual_norm`` their ``phi_bar``."""

    recurrence = ("direction", "old_direction", "w", "old_w")

    def __init__(self, residual: Tensor, limit: Tensor, active: Tensor) -> None:
        super().__init__(residual, limit, active)
        length = norm(residual)
        self.residual_norm = length
        self.direction = residual / torch.where(length > 0, length, 1)
        self.old_direction = self.w = self.old_w = self.iterate = torch.zeros_like(residual)
        self.beta = self.delta_bar = self.epsilon = self.sine = self.zero
        self.cosine = self.zero - 1
        self.gamma = self.zero + 1
        rounding = self.zero + torch.finfo(residual.dtype).eps ** 0.5
        relative = ratio(self.limit, 10 * self.residual_norm)
        self.floor = torch.maximum(relative, rounding)

    def absorb(self, product: Tensor) -> None:
        where = torch.where
        self.used = self.used + self.running
        v = self.direction
        u = torch.addcmul(product, self.beta, self.old_direction, value=-1)
        along = dot(v, u)
        u = torch.addcmul(u, along, v, value=-1)
        length = norm(u)
        alpha, beta = along, length
        # The previous rotations, applied to the new column.
        epsilon, delta = self.epsilon, self.cosine * self.delta_bar + self.sine * alpha
        gamma_bar = self.sine * self.delta_bar - self.cosine * alpha
        self.epsilon, self.delta_bar = self.sine * beta, -self.cosine * beta
        active = self._can_shrink(alpha, beta, gamma_bar)
        self.cosine, self.sine = gamma_bar / self.gamma, beta / self.gamma
        w = torch.addcmul(v, delta, self.w, value=-1)
        w = torch.addcmul(w, epsilon, self.old_w, value=-1)
        w = w / self.gamma
        step = torch.addcmul(self.iterate, (self.cosine * self.residual_norm), w)
        self.iterate = choose(active, step, self.iterate)
        self.residual_norm = where(active, self.sine * self.residual_norm, self.residual_norm)
        self.w, self.old_w = w, self.w
        self.direction, self.old_direction = u / length, v
        self.beta = beta
        self.running = active & (self.residual_norm > self.limit)

    def _can_shrink(self, alpha: Tensor, beta: Tensor, gamma_bar: Tensor) -> Tensor:
        """Rows that may take this step: finite, and with a residual that can still shrink."""
        running = self.running
        self.matrix_norm = torch.fmax(self.matrix_norm, torch.hypot(alpha, beta))
        self.gamma = torch.where(running, torch.hypot(gamma_bar, beta), self.gamma)
        # |A r| / |r| of the current iterate (Paige and Saunders, section 6).
        shrinking = torch.hypot(gamma_bar, self.delta_bar)
        return running & (self.gamma < torch.inf) & (shrinking > self.floor * self.matrix_norm)

    def solution(self) -> Tensor:
        return self.iterate

    def reliable(self) -> Tensor:
        return self.used <= 1  # one step needs no orthogonality

    def verdict(self) -> Tensor:
        where, isfinite = torch.where, torch.isfinite
        verdict = where(isfinite(self.gamma), int(Status.MAX_STEPS), int(Status.NONFINITE))
        return where(self.residual_norm <= self.limit, int(Status.CONVERGED), verdict)

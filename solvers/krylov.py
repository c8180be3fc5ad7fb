"""Krylov methods for batches of linear systems; :mod:`solvers.linear` runs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.core.checks import require_count
from solvers.core.device import choose, ratio, surely_all
from solvers.core.solution import Status


class LinearSolver(ABC):
    """Hyperparameters of a Krylov method: an immutable record that starts runs."""

    @abstractmethod
    def start(self, residual: Tensor, limit: Tensor, active: Tensor) -> KrylovRun:
        """Begin to solve ``A d = residual`` from ``d = 0``.

        Args:
            residual: (n, D) right-hand sides, float32 or float64.
            limit: (n, 1) residual norm at which a row has converged.
            active: (n, 1) bool; the other rows do not move.
        """


class KrylovRun(ABC):
    """A run of a Krylov method on the rows of a batch: vectors are (n, D), numbers (n, 1).

    The caller passes the product of the matrix and ``direction`` to ``absorb`` until no row is
    ``running`` or the run is ``exhausted``. Products do not change the result of a stopped row.
    """

    direction: Tensor  # the vector to multiply next
    residual_norm: Tensor  # ``|residual - A d|`` of the latest iterate, by the recurrence
    exhausted: bool = False  # the run cannot take another product (the end of a GMRES cycle)

    def __init__(self, limit: Tensor, active: Tensor) -> None:
        self.limit, self.running = limit, active
        self.used = torch.zeros_like(active, dtype=torch.int64)  # products of each row

    @abstractmethod
    def absorb(self, product: Tensor) -> None:
        """Advance by the ``product`` of the matrix and ``direction``."""

    @abstractmethod
    def result(self) -> tuple[Tensor, Tensor]:
        """The best ``d`` of each row, always finite, and its residual norm by the recurrence."""

    @abstractmethod
    def failure(self) -> Tensor:
        """(n, 1) :class:`solvers.Status` of rows above the limit; MAX_STEPS if more steps may help."""

    def rows(self, index: Tensor) -> KrylovRun:
        """The run of the rows ``index`` alone."""
        part = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(part, name, value.index_select(0, index))
        return part


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of the rows, (n, D), (n, D) -> (n, 1)."""
    return (left * right).sum(1, keepdim=True)


def norm(vectors: Tensor) -> Tensor:
    """Euclidean norms of the rows, (n, D) -> (n, 1)."""
    return torch.linalg.vector_norm(vectors, dim=1, keepdim=True)


@dataclass(frozen=True)
class CG(LinearSolver):
    """Conjugate gradients, for symmetric positive definite matrices; five vectors per sample.

    With residual ``r`` and direction ``p``: ``alpha = r.r / p.Ap``, ``x += alpha p``,
    ``r -= alpha Ap``, ``p = r' + (r'.r' / r.r) p``. The residual may rise in between, so the iterate
    of the smallest residual is kept. If ``p.Ap <= 0``, the sample ends as INDEFINITE.

    Source: Hestenes and Stiefel (1952), "Methods of conjugate gradients for solving linear systems",
    https://doi.org/10.6028/jres.049.044.
    """

    def start(self, residual: Tensor, limit: Tensor, active: Tensor) -> CGRun:
        return CGRun(residual, limit, active)


class CGRun(KrylovRun):
    """State of CG: ``square`` is ``r.r`` at the latest iterate, ``best_norm`` is ``|r|`` at the best."""

    def __init__(self, residual: Tensor, limit: Tensor, active: Tensor) -> None:
        super().__init__(limit, active)
        self.direction = self.r = residual
        self.iterate = self.best = torch.zeros_like(residual)
        self.square = dot(residual, residual)
        self.residual_norm = self.best_norm = torch.sqrt(self.square)
        # Below this norm the residual is rounding, and the curvature of its directions may underflow.
        self.rounding = torch.finfo(residual.dtype).eps * self.best_norm
        self.curvature = torch.ones_like(limit)

    def absorb(self, product: Tensor) -> None:
        self.used = self.used + self.running
        self.curvature = torch.where(self.running, dot(self.direction, product), self.curvature)
        active = self.running & (self.curvature > 0)
        alpha = torch.where(active, self.square / self.curvature, 0)
        self.iterate = torch.addcmul(self.iterate, alpha, self.direction)
        self.r = torch.addcmul(self.r, alpha, product, value=-1)
        square = dot(self.r, self.r)
        self.residual_norm = torch.sqrt(square)
        better = active & (self.residual_norm < self.best_norm)
        self.best = choose(better, self.iterate, self.best)
        self.best_norm = torch.where(better, self.residual_norm, self.best_norm)
        beta = torch.where(active, square / self.square, 0)
        self.direction = torch.addcmul(self.r, beta, self.direction)
        self.square = square
        self.running = active & (self.residual_norm > self.limit)

    def result(self) -> tuple[Tensor, Tensor]:
        return self.best, self.best_norm

    def failure(self) -> Tensor:
        exact = self.best_norm <= self.rounding
        status = torch.where(exact, Status.STALLED, Status.INDEFINITE)
        status = torch.where(self.curvature <= 0, status, Status.MAX_STEPS)
        finite = torch.isfinite(self.curvature) & torch.isfinite(self.square)
        return torch.where(finite, status, Status.NONFINITE)


@dataclass(frozen=True)
class MINRES(LinearSolver):
    """Minimal residuals, for symmetric matrices, indefinite or singular ones; six vectors per sample.

    The Lanczos process ``A v = beta' v' + alpha v + beta v_old`` builds an orthonormal basis of the
    Krylov space, Givens rotations solve the tridiagonal least-squares problem in it, and
    ``w = (v - delta w_1 - epsilon w_2) / gamma``, ``x += phi w``. The residual never rises.
    Where ``|A r|`` becomes small against ``|A| |r|`` the method restarts from the true residual. If
    that does not lower the residual, the sample ends as STALLED, at a least-squares solution if the
    system has no other.

    Source: Paige and Saunders (1975), "Solution of sparse indefinite systems of linear equations",
    https://doi.org/10.1137/0712047.
    """

    def start(self, residual: Tensor, limit: Tensor, active: Tensor) -> MINRESRun:
        return MINRESRun(residual, limit, active)


class MINRESRun(KrylovRun):
    """State of MINRES in the notation of Paige and Saunders, ``residual_norm`` their ``phi_bar``."""

    def __init__(self, residual: Tensor, limit: Tensor, active: Tensor) -> None:
        super().__init__(limit, active)
        self.residual_norm = length = norm(residual)
        self.direction = residual / torch.where(length > 0, length, 1)
        self.old_direction = self.w = self.old_w = self.iterate = torch.zeros_like(residual)
        self.beta = self.delta_bar = self.epsilon = self.sine = torch.zeros_like(limit)
        self.cosine, self.gamma = -torch.ones_like(limit), torch.ones_like(limit)
        self.matrix_norm = torch.zeros_like(limit)  # the largest lower bound of |A| seen
        rounding = torch.finfo(residual.dtype).eps ** 0.5
        self.floor = ratio(limit, 10 * length).clamp_min(rounding)

    def absorb(self, product: Tensor) -> None:
        running = self.running
        self.used = self.used + running
        v = self.direction
        u = torch.addcmul(product, self.beta, self.old_direction, value=-1)
        alpha = dot(v, u)
        u = torch.addcmul(u, alpha, v, value=-1)
        beta = norm(u)
        self.matrix_norm = torch.fmax(self.matrix_norm, torch.hypot(alpha, beta))
        # The previous rotations, applied to the new column.
        epsilon, delta = self.epsilon, self.cosine * self.delta_bar + self.sine * alpha
        gamma_bar = self.sine * self.delta_bar - self.cosine * alpha
        self.epsilon, self.delta_bar = self.sine * beta, -self.cosine * beta
        self.gamma = torch.where(running, torch.hypot(gamma_bar, beta), self.gamma)
        # |A r| / |r| of the current iterate (Paige and Saunders, section 6).
        shrinking = torch.hypot(gamma_bar, self.delta_bar) > self.floor * self.matrix_norm
        active = running & (self.gamma < torch.inf) & shrinking
        self.cosine, self.sine = gamma_bar / self.gamma, beta / self.gamma
        w = torch.addcmul(v, delta, self.w, value=-1)
        w = torch.addcmul(w, epsilon, self.old_w, value=-1) / self.gamma
        moved = torch.addcmul(self.iterate, self.cosine * self.residual_norm, w)
        self.iterate = choose(active, moved, self.iterate)
        self.residual_norm = torch.where(active, self.sine * self.residual_norm, self.residual_norm)
        self.w, self.old_w = w, self.w
        self.direction, self.old_direction, self.beta = u / beta, v, beta
        self.running = active & (self.residual_norm > self.limit)

    def result(self) -> tuple[Tensor, Tensor]:
        return self.iterate, self.residual_norm

    def failure(self) -> Tensor:
        return torch.where(self.gamma < torch.inf, Status.MAX_STEPS, Status.NONFINITE)


@dataclass(frozen=True)
class GMRES(LinearSolver):
    """Restarted GMRES(m), for any matrix; ``restart + 1`` vectors per sample.

    The Arnoldi process gives ``A V_k = V_{k+1} H`` with orthonormal ``V``, by classical Gram-Schmidt
    with reorthogonalisation. The iterate is ``V_k y`` where ``y`` minimises ``|beta e_1 - H y|``,
    ``beta`` the norm of the first residual. The residual never rises. After ``restart`` steps the
    method starts again from the true residual; a sample that has not gained ends as STALLED.

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
    """One cycle: ``basis`` is ``V`` (n, restart + 1, D), the rows of ``hessenberg`` are columns of ``H``.

    ``null`` is the unit vector that is orthogonal to the columns of ``H``. A new column rotates it by
    ``(c, s)`` into ``(-s null, c)`` and multiplies the residual norm by ``s``. ``columns`` counts the
    finite columns of ``H``; the Krylov space of a row that is ``broken`` is exhausted.
    """

    def __init__(self, residual: Tensor, limit: Tensor, active: Tensor, restart: int) -> None:
        super().__init__(limit, active)
        self.step, self.restart = 0, restart
        self.columns, self.broken = self.used, torch.zeros_like(active)
        self.beta = self.residual_norm = length = norm(residual)
        self.direction = residual / torch.where(length > 0, length, 1)
        self.basis = residual.new_empty(len(residual), restart + 1, residual.shape[1])
        self.basis[:, 0] = self.direction
        self.hessenberg = residual.new_zeros(len(residual), restart, restart + 1)
        self.null, self.matrix_norm = torch.ones_like(limit), torch.zeros_like(limit)
        # A column that is smaller, relative to |H|, ends the Krylov space.
        self.floor, self.tiny = (
            16 * torch.finfo(residual.dtype).eps,
            torch.finfo(residual.dtype).tiny,
        )

    def absorb(self, product: Tensor) -> None:
        running = self.running
        self.used = self.used + running
        basis = self.basis[:, : self.step + 1]
        first = basis @ product[:, :, None]
        rest = product - (first.mT @ basis)[:, 0]
        second = basis @ rest[:, :, None]
        rest = rest - (second.mT @ basis)[:, 0]
        entries, below = (first + second)[:, :, 0], norm(rest)
        self.direction = rest / below.clamp_min(self.tiny)
        self.basis[:, self.step + 1] = self.direction
        column = torch.cat([entries, below], dim=1)
        self.hessenberg[:, self.step, : self.step + 2] = column
        size = norm(column)
        good = running & (size < torch.inf)
        size = torch.maximum(self.matrix_norm, size)
        self.matrix_norm = torch.where(good, size, self.matrix_norm)
        self.broken = torch.where(good, below <= self.floor * size, self.broken)
        projection, positive = dot(self.null, entries), below + self.tiny
        pivot = torch.hypot(projection, positive)
        cosine, sine = projection / pivot, positive / pivot
        self.null = torch.cat([-sine * self.null, cosine], dim=1)
        self.residual_norm = torch.where(good, sine * self.residual_norm, self.residual_norm)
        self.columns = self.columns + good
        self.running = good & (self.residual_norm > self.limit) & ~self.broken
        self.step += 1
        self.exhausted = self.step == self.restart

    def result(self) -> tuple[Tensor, Tensor]:
        step = self.step
        entries, basis = self.hessenberg[:, :step, : step + 1], self.basis[:, :step]
        # Columns that were added after a row had stopped are left out; they may be NaN.
        mask = (torch.arange(step, device=basis.device) < self.columns)[:, :, None]
        if not surely_all(mask):
            entries, basis = torch.where(mask, entries, 0), torch.where(mask, basis, 0)
        rotation, triangle = torch.linalg.qr(entries.mT)
        diagonal = triangle.diagonal(dim1=1, dim2=2)
        usable = diagonal.abs() > self.floor * self.matrix_norm
        target = self.beta * rotation[:, 0] * usable
        diagonal.copy_(torch.where(usable, diagonal, 1))
        weights = torch.linalg.solve_triangular(triangle, target[:, :, None], upper=True)
        return (weights.mT @ basis)[:, 0], self.residual_norm

    def failure(self) -> Tensor:
        status = torch.where(self.broken, Status.STALLED, Status.MAX_STEPS)
        return torch.where(self.columns < self.used, Status.NONFINITE, status)


LINEAR = (CG, MINRES, GMRES)  # solvers that may be given by name

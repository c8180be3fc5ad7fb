"""Krylov methods for batches of linear systems ``A x = b``, from products with ``A`` alone.

:class:`LinearSolver` and :class:`KrylovRun` are their interface; :mod:`solvers.linear` runs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from solvers.core.checks import require_count
from solvers.core.device import choose, maybe_any, ratio, surely_all
from solvers.core.solution import Status


class LinearSolver(ABC):
    """Hyperparameters of a Krylov method: an immutable record that starts runs."""

    @abstractmethod
    def start(self, residual: Tensor, limit: Tensor, active: Tensor) -> KrylovRun:
        """Begin to solve ``A d = residual`` from ``d = 0``.

        Args:
            residual: (n, D) right-hand sides, float32 or float64.
            limit: (n, 1) residual norm at which a row has converged, same dtype.
            active: (n, 1) bool; the other rows are carried along, and frozen.
        """


class KrylovRun(ABC):
    """A run of a Krylov method on the rows of a working batch.

    The caller multiplies ``direction`` by the matrix and hands the product to ``absorb``, until no
    row is ``running`` or the run is ``exhausted``. Rows that have stopped are frozen: their result
    no longer changes, however often ``absorb`` is called, so a caller may learn late that they have
    stopped. Vectors are (n, D), numbers (n, 1).
    """

    recurrence: ClassVar[tuple[str, ...]] = ("direction",)  # vectors that products are made from
    direction: Tensor  # (n, D), what the matrix is to be applied to next
    residual_norm: Tensor  # ``|residual - A d|`` at ``solution()`` by the recurrence
    exhausted: bool = False  # the run can take no further product (the end of a GMRES cycle)

    def __init__(self, residual: Tensor, limit: Tensor, active: Tensor) -> None:
        self.limit = limit
        self.running = active
        self.used = torch.zeros_like(active, dtype=torch.int64)
        self.zero = torch.zeros_like(self.limit)
        self.matrix_norm = self.zero  # the largest lower bound of ``|A|`` seen

    @abstractmethod
    def absorb(self, product: Tensor) -> None:
        """Take the product of the matrix with ``direction``, (n, D), and advance."""

    @abstractmethod
    def solution(self) -> Tensor:
        """(n, D): the best ``d`` of each row, finite whatever the products were."""

    def final(self) -> tuple[Tensor, Tensor]:
        """``solution()`` and its residual norm (n, 1), where the recurrence does not know it."""
        return self.solution(), self.residual_norm

    def current(self) -> Tensor:
        """(n, 1): residual norm of the latest iterate, which need not be the best one."""
        return self.residual_norm

    def reliable(self) -> Tensor:
        """(n, 1) bool: ``residual_norm`` differs from the true one by rounding alone."""
        return self.matrix_norm >= 0

    @abstractmethod
    def verdict(self) -> Tensor:
        """(n, 1) int64 :class:`solvers.Status`; MAX_STEPS for a row that could have gone on."""

    def zero_stopped(self) -> None:
        """Set the vectors of stopped rows to zero, so that the matrix meets no NaN or infinity."""
        for name in self.recurrence:
            setattr(self, name, torch.where(self.running, getattr(self, name), 0))

    def stop(self, rows: Tensor) -> None:
        """Stop the rows where ``rows`` (n, 1) bool is True."""
        self.running = self.running & ~rows

    def rows(self, index: Tensor) -> KrylovRun:
        """The run of the rows ``index`` (an array of integers) alone."""
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


FLOOR = 16  # times the machine precision and |H|: a smaller column ends a Krylov space
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


LINEAR = (CG, MINRES, GMRES)  # what is known by its name

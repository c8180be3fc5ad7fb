"""Krylov methods for batches of linear systems ``A x = b`` that need only products with ``A``.

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
        """Start to solve ``A d = residual`` from ``d = 0``.

        Args:
            residual: (n, D) right-hand sides, float32 or float64.
            limit: (n, 1) residual norm at which a row has converged, same dtype.
            active: (n, 1) bool; the other rows are frozen.
        """


class KrylovRun(ABC):
    """A run of a Krylov method on the rows of a working batch.

    The caller multiplies ``direction`` by the matrix and passes the product to ``absorb`` until no
    row is ``running`` or the run is ``exhausted``. Rows that have stopped are frozen, so further calls
    of ``absorb`` do not change their result. Vectors are (n, D), scalars (n, 1).
    """

    recurrence: ClassVar[tuple[str, ...]] = ("direction",)  # vectors that enter products
    direction: Tensor  # (n, D), the next vector to multiply
    residual_norm: Tensor  # ``|residual - A d|`` at ``solution()`` by the recurrence
    exhausted: bool = False  # the run accepts no further product (the end of a GMRES cycle)

    def __init__(self, residual: Tensor, limit: Tensor, active: Tensor) -> None:
        self.limit = limit
        self.running = active
        self.used = torch.zeros_like(active, dtype=torch.int64)
        self.zero = torch.zeros_like(self.limit)
        self.matrix_norm = self.zero  # the largest lower bound of ``|A|`` seen

    @abstractmethod
    def absorb(self, product: Tensor) -> None:
        """Advance by the product of the matrix with ``direction``, (n, D)."""

    @abstractmethod
    def solution(self) -> Tensor:
        """Return the best ``d`` of each row, (n, D), which is always finite."""

    def final(self) -> tuple[Tensor, Tensor]:
        """Return ``solution()`` and its residual norm (n, 1), computed if the recurrence lacks it."""
        return self.solution(), self.residual_norm

    def current(self) -> Tensor:
        """Return the residual norm (n, 1) of the latest iterate, which need not be the best one."""
        return self.residual_norm

    def reliable(self) -> Tensor:
        """Return whether ``residual_norm`` differs from the true one by rounding only, (n, 1) bool."""
        return self.matrix_norm >= 0

    @abstractmethod
    def verdict(self) -> Tensor:
        """Return the :class:`solvers.Status` (n, 1) int64; MAX_STEPS for a row that could continue."""

    def zero_stopped(self) -> None:
        """Set the vectors of stopped rows to zero, so that products contain no NaN or infinity."""
        for name in self.recurrence:
            setattr(self, name, torch.where(self.running, getattr(self, name), 0))

    def stop(self, rows: Tensor) -> None:
        """Stop the rows where ``rows`` (n, 1) bool is True."""
        self.running = self.running & ~rows

    def rows(self, index: Tensor) -> KrylovRun:
        """Return the run restricted to the rows ``index`` (integers)."""
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
    ``A``. The residual may increase in between, so the iterate with the smallest residual is kept.
    The method stores five vectors per sample.

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
        # Below this level the residual is rounding error and curvatures may underflow.
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
    """Minimal residual method for symmetric matrices, including indefinite and singular ones.

    The Lanczos process ``A v = beta' v' + alpha v + beta v_old`` builds an orthonormal basis of the
    Krylov space, Givens rotations solve the tridiagonal least-squares problem in it, and
    ``w = (v - delta w_1 - epsilon w_2) / gamma``, ``x += phi w``. The residual never increases. The
    method stores six vectors per sample.

    The recurrence for the residual norm requires an orthonormal Lanczos basis. Rounding and
    nonsymmetric matrices destroy orthogonality, so one more product, which counts like the others,
    always verifies the norm.

    When ``|A r|`` becomes small relative to ``|A| |r|`` the method restarts from the true residual.
    If that does not reduce it, the sample ends with ``Status.STALLED``, at a least-squares
    solution if the system has no solution.

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
        """Return the rows whose step is finite and whose residual can still decrease."""
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


FLOOR = 16  # a column below FLOOR eps |H| ends a Krylov space
_FIRST_CAPACITY = 8  # basis vectors allocated at first; the capacity doubles when they are used
# Cycles of at most so many steps and numbers are allocated at once.
_SHORT, _SMALL = 24, 1 << 18


@dataclass(frozen=True)
class GMRES(LinearSolver):
    """Restarted GMRES(m) for general matrices.

    The Arnoldi process gives ``A V_k = V_{k+1} H`` with orthonormal ``V``, by classical Gram-Schmidt
    with reorthogonalisation (two pairs of batched matrix products per step). The iterate is ``V_k y``,
    where ``y`` minimises ``|beta e_1 - H y|`` and ``beta`` is the norm of the first residual. The residual
    never increases. Memory grows with the number of steps, up to ``restart + 1`` vectors.
    After ``restart`` steps the method restarts from the true residual, which costs one product.
    A sample whose residual a whole cycle did not reduce ends with ``Status.STALLED``.

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
        # Columns added after a row stopped are ignored, because they may be NaN.
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
        # The weights omit some columns that the recurrence includes: |beta e_1 - H y|.
        left = -(weights.mT @ entries)[:, 0]
        left[:, :1] += self.beta
        return solution, torch.where(self.broken, norm(left), self.residual_norm)

    def verdict(self) -> Tensor:
        verdict = torch.where(self.broken, int(Status.STALLED), int(Status.MAX_STEPS))
        verdict = torch.where(self.columns < self.used, int(Status.NONFINITE), verdict)
        return torch.where(self.residual_norm <= self.limit, int(Status.CONVERGED), verdict)


LINEAR = (CG, MINRES, GMRES)  # solvers that can be selected by name

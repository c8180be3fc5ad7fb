"""Krylov methods for batches of linear systems; :mod:`solvers.linear` runs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from solvers.core.checks import require_callable, require_count
from solvers.core.layout import Layout
from solvers.core.rows import choose, ratio

VectorMap = Callable[[Tensor], Tensor]  # of matrices (n, D)


def identity(vectors: Tensor) -> Tensor:
    """The preconditioner of a method without one; it returns the same tensor."""
    return vectors


@dataclass(frozen=True)
class LinearSolver(ABC):
    """Hyperparameters of a Krylov method: an immutable record that starts runs.

    Args:
        preconditioner: linear function ``v -> M v`` of one argument, where M approximates the inverse of the
            matrix A of the system: for ``Newton`` that is ``I - J``, or the derivative of F for a root, and
            for ``Implicit`` its transpose. ``v`` has the structure, shapes and dtypes of the state or of the
            right-hand side; for a causal block they are (B N, 1, d). M must be symmetric positive definite
            for ``CG`` and ``MINRES``. The function may close over tensors that all samples share, but over
            batched ones only with ``compact=False``, because it receives the unsolved samples. It is called
            once per product with A and receives no gradients: the tolerance refers to the residual without M,
            so M changes the number of products but not the solution.
    """

    preconditioner: Callable[[Any], Any] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        require_callable("preconditioner", self.preconditioner, optional=True)

    def on_vectors(self, layout: Layout, mask: Tensor | None = None) -> VectorMap:
        """Return the preconditioner as a map of matrices (n, D); the identity if there is none.

        Where ``mask`` (n, D) is False, the system has neither rows nor columns, and the result is zero.
        """
        if self.preconditioner is None:
            return identity
        function = layout.vector_map(self.preconditioner, "preconditioner")
        return function if mask is None else lambda v: function(v).masked_fill(~mask, 0)

    @abstractmethod
    def start(
        self, residual: Tensor, limit: Tensor, active: Tensor, precondition: VectorMap = identity
    ) -> KrylovRun:
        """Begin to solve ``A d = residual`` (n, D) from ``d = 0``, in float32 or float64.

        ``limit`` (n, 1) is the residual norm at which a row has converged. Only the rows that are
        ``active`` (n, 1) move.
        """


class KrylovRun(ABC):
    """A run of a Krylov method on the rows of a batch: vectors are (n, D), numbers (n, 1).

    The caller passes the product of the matrix and ``direction`` to ``absorb`` until no row is
    ``running``. Products do not change the result of a row that has stopped.
    """

    direction: Tensor  # the vector to multiply next
    residual_norm: Tensor  # ``|residual - A d|`` of the latest iterate, by the recurrence

    def __init__(self, limit: Tensor, active: Tensor, precondition: VectorMap) -> None:
        self.limit, self.running, self.precondition = limit, active, precondition
        self.used = torch.zeros_like(active, dtype=torch.int64)  # products of each row
        # Rows whose matrix, or whose preconditioner, is not positive definite.
        self.indefinite = torch.zeros_like(active)

    @abstractmethod
    def absorb(self, product: Tensor) -> None:
        """Advance by the ``product`` of the matrix and ``direction``."""

    @abstractmethod
    def result(self) -> tuple[Tensor, Tensor]:
        """The best ``d`` of each row, always finite, and its residual norm by the recurrence."""

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
    of the smallest residual is kept. If ``p.Ap <= 0``, the sample ends as INDEFINITE. With a
    ``preconditioner`` M, ``r.Mr`` takes the place of ``r.r``, and ``Mr`` that of r in the direction.

    Source: Hestenes and Stiefel (1952), "Methods of conjugate gradients for solving linear systems",
    https://doi.org/10.6028/jres.049.044.
    """

    def start(
        self, residual: Tensor, limit: Tensor, active: Tensor, precondition: VectorMap = identity
    ) -> CGRun:
        return CGRun(residual, limit, active, precondition)


class CGRun(KrylovRun):
    """State of CG: ``square`` is ``r.Mr`` at the latest iterate, ``best_norm`` is ``|r|`` at the best."""

    def __init__(
        self, residual: Tensor, limit: Tensor, active: Tensor, precondition: VectorMap
    ) -> None:
        super().__init__(limit, active, precondition)
        self.r, self.direction = residual, precondition(residual)
        self.iterate = self.best = torch.zeros_like(residual)
        self.square = dot(residual, self.direction)
        self.residual_norm = self.best_norm = norm(residual)
        # Below this norm the residual is rounding, and the curvature of its directions may underflow.
        self.rounding = 10 * torch.finfo(residual.dtype).eps * self.best_norm

    def absorb(self, product: Tensor) -> None:
        self.used = self.used + self.running
        curvature = dot(self.direction, product)
        indefinite = (curvature <= 0) | (self.square <= 0)
        self.indefinite |= self.running & indefinite & (self.best_norm > self.rounding)
        active = self.running & (curvature > 0) & (self.square > 0)
        alpha = torch.where(active, self.square / curvature, 0)
        self.iterate = torch.addcmul(self.iterate, alpha, self.direction)
        self.r = torch.addcmul(self.r, alpha, product, value=-1)
        image = self.precondition(self.r)
        square = dot(self.r, image)
        self.residual_norm = torch.sqrt(square) if image is self.r else norm(self.r)
        better = active & (self.residual_norm < self.best_norm)
        self.best = choose(better, self.iterate, self.best)
        self.best_norm = torch.where(better, self.residual_norm, self.best_norm)
        beta = torch.where(active, square / self.square, 0)
        self.direction = torch.addcmul(image, beta, self.direction)
        self.square = square
        self.running = active & (self.residual_norm > self.limit)

    def result(self) -> tuple[Tensor, Tensor]:
        return self.best, self.best_norm


@dataclass(frozen=True)
class MINRES(LinearSolver):
    """Minimal residuals, for symmetric matrices, indefinite or singular ones; six vectors per sample.

    The Lanczos process ``A v = beta' v' + alpha v + beta v_old`` builds an orthonormal basis of the
    Krylov space, Givens rotations solve the tridiagonal least-squares problem in it, and
    ``w = (v - delta w_1 - epsilon w_2) / gamma``, ``x += phi w``. The residual never rises. Where
    ``|A r|`` is small against ``|A| |r|`` the method restarts from the true residual. A sample that
    does not gain from that ends as STALLED, at a least-squares solution if there is no other. With a
    ``preconditioner`` M the basis is orthonormal in the inner product of M, and ``r.Mr`` never rises
    instead of ``|r|``; if M is not positive definite, the sample ends as INDEFINITE.

    Source: Paige and Saunders (1975), "Solution of sparse indefinite systems of linear equations",
    https://doi.org/10.1137/0712047.
    """

    def start(
        self, residual: Tensor, limit: Tensor, active: Tensor, precondition: VectorMap = identity
    ) -> MINRESRun:
        return MINRESRun(residual, limit, active, precondition)


class MINRESRun(KrylovRun):
    """State of MINRES in the notation of Paige and Saunders.

    The Lanczos vectors are ``basis``, and ``direction`` is M times the latest one: the same without a
    preconditioner. Then ``phi_bar`` is the norm of the residual; otherwise it is ``sqrt(r.Mr)``, and r has a
    recurrence of its own.
    """

    def __init__(
        self, residual: Tensor, limit: Tensor, active: Tensor, precondition: VectorMap
    ) -> None:
        super().__init__(limit, active, precondition)
        self.residual_norm, self.r = norm(residual), residual
        length = self._advance(residual)
        self.phi_bar = length
        self.old_basis = self.w = self.old_w = self.iterate = torch.zeros_like(residual)
        self.beta = self.delta_bar = self.epsilon = self.sine = torch.zeros_like(limit)
        self.cosine = -torch.ones_like(limit)
        self.matrix_norm = torch.zeros_like(limit)  # a lower bound of |A|
        floor = ratio(limit, 10 * self.residual_norm)
        self.floor = floor.clamp_min(torch.finfo(residual.dtype).eps ** 0.5)

    def _advance(self, vector: Tensor) -> Tensor:
        """Make ``vector`` (n, D) the latest one of the basis, and return its length (n, 1) before."""
        image = self.precondition(vector)
        if image is vector:
            length = norm(vector)
        else:
            square = dot(vector, image)
            self.indefinite = self.indefinite | self.running & (square < 0)
            length = torch.sqrt(square)
        unit = torch.where(length > 0, length, 1)
        self.basis = vector / unit
        self.direction = self.basis if image is vector else image / unit
        return length

    def absorb(self, product: Tensor) -> None:
        self.used = self.used + self.running
        v, basis = self.direction, self.basis
        u = torch.addcmul(product, self.beta, self.old_basis, value=-1)
        alpha = dot(v, u)
        u = torch.addcmul(u, alpha, basis, value=-1)
        beta = self._advance(u)
        self.matrix_norm = torch.fmax(self.matrix_norm, torch.hypot(alpha, beta))
        # The previous rotations, applied to the new column.
        epsilon, delta = self.epsilon, self.cosine * self.delta_bar + self.sine * alpha
        gamma_bar = self.sine * self.delta_bar - self.cosine * alpha
        gamma = torch.hypot(gamma_bar, beta)
        self.epsilon, self.delta_bar = self.sine * beta, -self.cosine * beta
        # |A r| / |r| of the current iterate (Paige and Saunders, section 6).
        shrinking = torch.hypot(gamma_bar, self.delta_bar) > self.floor * self.matrix_norm
        active = self.running & (gamma < torch.inf) & shrinking
        self.cosine, self.sine = gamma_bar / gamma, beta / gamma
        w = torch.addcmul(v, delta, self.w, value=-1)
        w = torch.addcmul(w, epsilon, self.old_w, value=-1) / gamma
        moved = torch.addcmul(self.iterate, self.cosine * self.phi_bar, w)
        self.iterate = choose(active, moved, self.iterate)
        self.phi_bar = torch.where(active, self.sine * self.phi_bar, self.phi_bar)
        if self.precondition is identity:
            self.residual_norm = self.phi_bar
        else:
            rest = self.sine.square() * self.r
            rest = torch.addcmul(rest, self.phi_bar * self.cosine, self.basis, value=-1)
            self.r = choose(active, rest, self.r)
            self.residual_norm = norm(self.r)
        self.w, self.old_w, self.old_basis, self.beta = w, self.w, basis, beta
        self.running = active & (self.residual_norm > self.limit)

    def result(self) -> tuple[Tensor, Tensor]:
        return self.iterate, self.residual_norm


@dataclass(frozen=True)
class GMRES(LinearSolver):
    """Restarted GMRES(m), for any matrix; ``restart + 1`` vectors per sample.

    The Arnoldi process gives ``A V_k = V_{k+1} H`` with orthonormal ``V``, by classical Gram-Schmidt
    with reorthogonalisation. The iterate is ``V_k y`` where ``y`` minimises ``|beta e_1 - H y|``,
    ``beta`` the norm of the first residual. The residual never rises. After ``restart`` steps the
    method starts again from the true residual; a sample that has not gained ends as STALLED. With a
    ``preconditioner`` M it solves ``A M y = r`` for ``d = M y``.

    Args:
        restart: steps per cycle, an integer >= 1.

    Source: Saad and Schultz (1986), "GMRES: a generalized minimal residual algorithm for solving
    nonsymmetric linear systems", https://doi.org/10.1137/0907058.
    """

    restart: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("restart", self.restart)

    def start(
        self, residual: Tensor, limit: Tensor, active: Tensor, precondition: VectorMap = identity
    ) -> GMRESRun:
        return GMRESRun(residual, limit, active, precondition, self.restart)


class GMRESRun(KrylovRun):
    """One cycle: ``basis`` is ``V`` (n, restart + 1, D), the rows of ``hessenberg`` are columns of ``H``.

    ``null`` is the unit vector that is orthogonal to the columns of ``H``. A new column rotates it by
    ``(c, s)`` into ``(-s null, c)`` and multiplies the residual norm by ``s``.
    """

    def __init__(
        self, residual: Tensor, limit: Tensor, active: Tensor, precondition: VectorMap, restart: int
    ) -> None:
        super().__init__(limit, active, precondition)
        self.step, self.restart = 0, restart
        self.beta = self.residual_norm = length = norm(residual)
        self.basis = residual.new_empty(len(residual), restart + 1, residual.shape[1])
        self.basis[:, 0] = residual / torch.where(length > 0, length, 1)
        self.direction = precondition(self.basis[:, 0])
        self.hessenberg = residual.new_zeros(len(residual), restart, restart + 1)
        self.null, self.matrix_norm = torch.ones_like(limit), torch.zeros_like(limit)
        # A column that is smaller, relative to |H|, is rounding: the Krylov space ends.
        self.floor = 16 * torch.finfo(residual.dtype).eps

    def absorb(self, product: Tensor) -> None:
        self.used = self.used + self.running
        step, tiny = self.step, torch.finfo(product.dtype).tiny
        basis = self.basis[:, : step + 1]
        first = basis @ product[:, :, None]
        rest = product - (first.mT @ basis)[:, 0]
        second = basis @ rest[:, :, None]
        rest = rest - (second.mT @ basis)[:, 0]
        entries, below = (first + second)[:, :, 0], norm(rest)
        column = torch.cat([entries, below], dim=1)
        size = norm(column)
        active = self.running & (size < torch.inf)
        self.matrix_norm = torch.maximum(self.matrix_norm, torch.where(active, size, 0))
        # The columns of a stopped row are zero.
        self.hessenberg[:, step, : step + 2] = torch.where(active, column, 0)
        self.basis[:, step + 1] = torch.where(active, rest / below.clamp_min(tiny), 0)
        self.direction = self.precondition(self.basis[:, step + 1])
        projection, positive = dot(self.null, entries), below + tiny
        pivot = torch.hypot(projection, positive)
        cosine, sine = projection / pivot, positive / pivot
        self.null = torch.cat([-sine * self.null, cosine], dim=1)
        self.residual_norm = torch.where(active, sine * self.residual_norm, self.residual_norm)
        goes_on = (self.residual_norm > self.limit) & (below > self.floor * self.matrix_norm)
        self.step = step + 1
        self.running = active & goes_on & (self.step < self.restart)

    def result(self) -> tuple[Tensor, Tensor]:
        columns = self.hessenberg[:, : self.step, : self.step + 1]
        rotation, triangle = torch.linalg.qr(columns.mT)
        diagonal = triangle.diagonal(dim1=1, dim2=2)
        usable = diagonal.abs() > self.floor * self.matrix_norm
        target = self.beta * rotation[:, 0] * usable
        diagonal.copy_(torch.where(usable, diagonal, 1))
        weights = torch.linalg.solve_triangular(triangle, target[:, :, None], upper=True)
        combined = (weights.mT @ self.basis[:, : self.step])[:, 0]
        return self.precondition(combined), self.residual_norm


LINEAR = (CG, MINRES, GMRES)  # solvers that may be given by name

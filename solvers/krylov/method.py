"""The interface of the Krylov methods for linear systems."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import ClassVar

import torch
from torch import Tensor


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

"""What the Krylov methods for linear systems have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy

import torch
from torch import Tensor


class LinearSolver(ABC):
    """Hyperparameters of a Krylov method: an immutable record that starts runs."""

    @abstractmethod
    def start(self, residual: Tensor, limit: Tensor, active: Tensor) -> KrylovRun:
        """Begin to solve ``A d = residual`` from ``d = 0``.

        Args:
            residual: (n, D) right-hand sides, float32 or float64.
            limit: (n, 1) residual norm at which a row has converged.
            active: (n, 1) bool; the other rows are carried along, and frozen.
        """


class KrylovRun(ABC):
    """A run of a Krylov method on the rows of a working batch; all its tensors are per row.

    The driver multiplies ``direction`` by the matrix and hands the product to ``absorb``, until
    no row is ``active``. Rows that have stopped are frozen: their result no longer changes, however
    often ``absorb`` is called, so the driver may learn late that they have stopped.

    Attributes:
        active: (n, 1) bool, rows still running.
        products: (n, 1) int64, products that the row has used.
        direction: (n, D), what the matrix is to be applied to next.
        matrix_norm: (n, 1), largest lower bound of ``|A|`` seen.
        exhausted: True when the run can take no further product (the end of a GMRES cycle).
    """

    active: Tensor
    products: Tensor
    direction: Tensor
    matrix_norm: Tensor
    exhausted: bool = False

    @abstractmethod
    def absorb(self, product: Tensor) -> None:
        """Take the product of the matrix with ``direction``, (n, D), and advance."""

    @abstractmethod
    def solution(self) -> Tensor:
        """(n, D): the best ``d`` of each row, finite whatever the products were."""

    @abstractmethod
    def residual(self) -> Tensor:
        """(n, 1): ``|residual - A d|`` at ``solution()``, as the recurrence has it."""

    def current(self) -> Tensor:
        """(n, 1): the same at the latest iterate, which need not be the best one."""
        return self.residual()

    @abstractmethod
    def reliable(self) -> Tensor:
        """(n, 1) bool: ``residual()`` differs from the true one by nothing but rounding."""

    @abstractmethod
    def verdict(self) -> Tensor:
        """(n, 1) int64 :class:`Status`; MAX_STEPS for a row that could have gone on."""

    @abstractmethod
    def quiet(self) -> None:
        """Put zeros where stopped rows would feed garbage to the matrix."""

    def stop(self, rows: Tensor) -> None:
        """Stop the rows where ``rows`` (n, 1) is True."""
        self.active = self.active & ~rows

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


def choose(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Rows of ``new`` (n, D) where ``mask`` (n, 1), else rows of ``old``: never a mixture.

    Where every row is new the result is ``new`` itself; looking is free on the CPU alone.
    """
    if mask.device.type == "cpu" and bool(mask.all()):
        return new
    return torch.where(mask, new, old)

"""Anderson acceleration (type II).

On a CPU, without an energy and without autograd, ``native/turns.h`` implements the same method in C++.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from solvers.core.checks import require_count, require_number
from solvers.core.device import small_dtype
from solvers.core.loop import Solver, Turn
from solvers.core.modes import in_transform
from solvers.core.problem import Problem
from solvers.core.rows import (
    Point,
    clear_rows,
    combine,
    inner_products,
    where_rows,
    write_symmetric,
)


@dataclass(frozen=True)
class Anderson(Solver):
    r"""Anderson acceleration of type II.

    With residuals ``r_k = f(z_k) - z_k``, differences ``dZ, dR`` of the last ``memory`` steps and
    ``c = argmin |r_k - dR c|^2`` (ridge included)::

        z_{k+1} = z_k - dZ c + damping (r_k - dR c)

    The Gram matrix ``dR^T dR`` gains one row and column per step. The ridge multiplies its diagonal,
    so that the steps are independent of the scale of the problem. A sample discards its differences
    after a rejected step.

    Args:
        memory: number of stored differences, >= 1.
        damping: mixing parameter in (0, 2].
        regularization: relative ridge, >= 0; at least the rounding level of the Gram matrix.

    Example:
        >>> import torch, solvers
        >>> def f(z):  # a linear map that contracts by 0.95
        ...     return 0.95 * z.flip(1) + 1.0
        >>> tolerance = solvers.Tolerance(rtol=1e-5)
        >>> options = {"tolerance": tolerance, "max_steps": 500}
        >>> start = torch.zeros(1, 3)
        >>> solvers.fixed_point(f, start, solver=solvers.Anderson(), **options).evaluations
        tensor([3])
        >>> solvers.fixed_point(f, start, solver=solvers.Forward(), **options).evaluations
        tensor([168])

    Source: Walker and Ni, "Anderson acceleration for fixed-point iterations", SIAM J. Numer. Anal.
    49 (2011), eq. 2.1, https://doi.org/10.1137/10078356X; the types are defined by Fang and Saad (2009),
    https://doi.org/10.1002/nla.617.
    """

    memory: int = 10
    damping: float = 1.0
    regularization: float = 1e-12

    def __post_init__(self) -> None:
        require_count("memory", self.memory)
        require_number("damping", self.damping, low=0.0, high=2.0, closed=False)
        require_number("regularization", self.regularization, low=0.0, high=1.0)

    def init(self, point: Point, problem: Problem) -> Ring | Lists:
        kept = min(self.memory, point.z.shape[1])  # more differences than dimensions are dependent
        recorded = torch.is_grad_enabled() or in_transform()
        return (Lists if recorded else Ring).empty(kept, point.residual)

    def step(self, state: Ring | Lists, turn: Turn) -> Tensor:
        """Store the newest difference and mix all stored ones."""
        current, last = turn.current, state.last
        state.last = current
        if last is not None:
            change = current.residual - last.residual
            state.remember((current.z - last.z).add(change, alpha=self.damping), change)
            row, slot = state.products(change), state.newest
            ridge, tiny = self.ridge(row.dtype)
            state.gram = write_symmetric(state.gram, slot, row)
            state.gram[:, slot, slot] = row[:, slot] * ridge + tiny
        if turn.accepted is not None:
            state.forget(~turn.accepted)
        del last  # its states are not needed while the next one is made
        damped = current.z.add(current.residual, alpha=self.damping)
        if not state.filled:
            return damped
        gram = state.gram[:, : state.filled, : state.filled]
        return state.subtracted(damped, _solve_small(gram, state.products(current.residual)))

    def ridge(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return a factor of the Gram matrix's diagonal and a number to add to it.

        The ridge is relative to each diagonal entry, so it scales with the problem. A rejected step
        leaves a zero difference with a zero row and column: adding the smallest normal number keeps
        the matrix regular and gives that difference the weight zero.
        """
        limits = torch.finfo(dtype)
        return 1 + max(self.regularization, 4 * limits.eps), limits.tiny


@dataclass
class _Differences:
    """Differences of the last steps; the newest one overwrites the oldest."""

    kept: int  # slots at most
    gram: Tensor  # (B, m, m) dR^T dR with its ridge
    last: Point | None = None  # None before the first step
    count: int = 0  # differences made so far

    @property
    def filled(self) -> int:
        """Slots in use."""
        return min(self.count, self.kept)

    @property
    def newest(self) -> int:
        """The slot of the newest difference."""
        return (self.count - 1) % self.kept

    def forget(self, rows: Tensor) -> None:
        """Drop the history of the rows (B,) bool whose accelerated step was rejected."""
        unit = torch.eye(self.kept, dtype=self.gram.dtype, device=self.gram.device)
        self.gram = where_rows(rows, unit.expand_as(self.gram), self.gram)


@dataclass
class Ring(_Differences):
    """Differences in one buffer, written in place."""

    steps: Tensor = field(kw_only=True)  # (B, m, D) dZ + damping dR
    changes: Tensor = field(kw_only=True)  # (B, m, D) dR

    @classmethod
    def empty(cls, kept: int, like: Tensor) -> Ring:
        batch, size = like.shape
        gram = like.new_zeros(batch, kept, kept, dtype=small_dtype(like.dtype))
        steps, changes = (like.new_empty(batch, kept, size) for _ in range(2))
        return cls(kept, gram, steps=steps, changes=changes)

    def remember(self, step: Tensor, change: Tensor) -> None:
        self.count += 1
        self.steps[:, self.newest], self.changes[:, self.newest] = step, change

    def products(self, vector: Tensor) -> Tensor:
        """(B, k) inner products of the changes with a vector (B, D)."""
        return inner_products(self.changes[:, : self.filled], vector)

    def subtracted(self, start: Tensor, weights: Tensor) -> Tensor:
        """``start - sum_j weights_j step_j``, (B, D)."""
        return combine(start, weights, self.steps[:, : self.filled], sign=-1)

    def forget(self, rows: Tensor) -> None:
        super().forget(rows)
        self.steps, self.changes = (clear_rows(t, rows) for t in (self.steps, self.changes))


@dataclass
class Lists(_Differences):
    """Differences in separate tensors for autograd, which would copy a buffer at every step."""

    steps: list[Tensor] = field(default_factory=list)  # of (B, D)
    changes: list[Tensor] = field(default_factory=list)

    @classmethod
    def empty(cls, kept: int, like: Tensor) -> Lists:
        return cls(kept, like.new_zeros(len(like), kept, kept, dtype=small_dtype(like.dtype)))

    def remember(self, step: Tensor, change: Tensor) -> None:
        self.count += 1
        for kept, new in ((self.steps, step), (self.changes, change)):
            kept[self.newest : self.newest + 1] = [new]

    def products(self, vector: Tensor) -> Tensor:
        """(B, k) inner products of the changes with a vector (B, D)."""
        wide = vector.to(self.gram.dtype)
        return torch.stack([(each.to(wide.dtype) * wide).sum(1) for each in self.changes], 1)

    def subtracted(self, start: Tensor, weights: Tensor) -> Tensor:
        """``start - sum_j weights_j step_j``, (B, D)."""
        for weight, step in zip(weights.to(start.dtype).unbind(1), self.steps, strict=True):
            start = start - weight.unsqueeze(1) * step
        return start

    def forget(self, rows: Tensor) -> None:
        super().forget(rows)
        for kept in (self.steps, self.changes):
            kept[:] = [where_rows(rows, torch.zeros_like(each), each) for each in kept]


def _solve_small(matrices: Tensor, right: Tensor) -> Tensor:
    """(B, m) solutions of symmetric systems (B, m, m) that are regular by construction."""
    if matrices.shape[1] == 1:
        return right / matrices[:, 0]
    return torch.linalg.solve_ex(matrices, right.unsqueeze(2))[0].squeeze(2)

"""Anderson acceleration (type II).

On a CPU, without an energy and without autograd, ``native/turns.h`` implements the same method in C++.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from solvers.core.checks import require_count, require_number
from solvers.core.loop import Solver, SolverInput
from solvers.core.problem import Problem
from solvers.core.rows import Evaluation, combine, inner_products, put_rows, small_dtype, where_rows


@dataclass(frozen=True)
class Anderson(Solver):
    r"""Anderson acceleration of type II with a safeguard.

    With residuals ``r_k = f(z_k) - z_k``, differences ``dZ, dR`` of the last ``memory`` steps and
    ``c = argmin |r_k - dR c|^2 + regularization sum_j c_j^2 (|dR_j|^2 + |dZ_j|^2)``::

        z_{k+1} = z_k - dZ c + damping (r_k - dR c)

    The Gram matrix ``dR^T dR`` gains one row and column per step. The regularization does not depend on the
    scale of the problem, and it bounds the step where the residual hardly changes. An accelerated point that
    raises the residual is rejected: the sample takes the step ``z + r`` instead and discards its differences.

    Args:
        memory: number of stored differences, >= 1.
        damping: mixing parameter in (0, 2].
        regularization: >= 0; at least the rounding level of the Gram matrix.

    Example:
        >>> import torch, solvers
        >>> def f(z):  # a linear map that contracts by 0.95
        ...     return 0.95 * z.flip(1) + 1.0
        >>> tolerance = solvers.Tolerance(rtol=1e-5)
        >>> options = {"tolerance": tolerance, "max_steps": 500}
        >>> start = torch.zeros(1, 3)
        >>> solvers.fixed_point(f, start, solver=solvers.Anderson(), **options).evaluations
        tensor([4])
        >>> solvers.fixed_point(f, start, solver=solvers.Forward(), **options).evaluations
        tensor([229])

    Source: Walker and Ni, "Anderson acceleration for fixed-point iterations", SIAM J. Numer. Anal.
    49 (2011), eq. 2.1, https://doi.org/10.1137/10078356X; the types are defined by Fang and Saad (2009),
    https://doi.org/10.1002/nla.617; safeguards by Zhang, O'Donoghue and Boyd, SIAM J. Optim. 30 (2020),
    https://doi.org/10.1137/18M1232772.
    """

    memory: int = 10
    damping: float = 1.0
    regularization: float = 1e-8

    window: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require_count("memory", self.memory)
        require_number("damping", self.damping, low=0.0, high=2.0, closed=False)
        require_number("regularization", self.regularization, low=0.0, high=1.0)

    def init(self, point: Evaluation, problem: Problem) -> Differences:
        batch, size = point.z.shape
        kept = min(self.memory, size)  # more differences than dimensions are dependent
        gram = point.z.new_zeros(batch, kept, kept, dtype=small_dtype(point.z.dtype))
        if torch.is_grad_enabled():
            return Differences(kept, gram, steps=[], changes=[])
        steps, changes = (point.z.new_empty(batch, kept, size) for _ in range(2))
        return Differences(kept, gram, steps=steps, changes=changes)

    def step(self, state: Differences, inputs: SolverInput) -> Tensor:
        """Store the newest difference and mix all stored ones."""
        current, last = inputs.current, state.last
        state.last = current
        if last is not None:
            change = current.residual - last.residual
            moved = current.z - last.z
            state.remember(moved.add(change, alpha=self.damping), change)
            row, slot = state.products(change), state.newest
            ridge, tiny = self.ridge(row.dtype)
            squares = torch.linalg.vector_norm(moved, dim=1, dtype=row.dtype).square()
            state.gram = state.gram.clone() if torch.is_grad_enabled() else state.gram
            state.gram[:, slot, : state.filled] = state.gram[:, : state.filled, slot] = row
            state.gram[:, slot, slot] = row[:, slot] * (1 + ridge) + ridge * squares + tiny
        if inputs.accepted is not None:
            state.forget(~inputs.accepted)
        del last  # its states are not needed while the next one is made
        damped = current.z.add(current.residual, alpha=self.damping)
        if not state.filled:
            return damped
        gram = state.gram[:, : state.filled, : state.filled]
        right = state.products(current.residual)
        # The system is regular by construction.
        if state.filled == 1:
            weights = right / gram[:, 0]
        else:
            weights = torch.linalg.solve_ex(gram, right[:, :, None])[0][:, :, 0]
        return state.subtracted(damped, weights)

    def pairs(self, state: Differences, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        # The newest pair will take the place of the oldest.
        oldest = state.count % state.kept if state.count >= state.kept else -1
        kept = [slot for slot in range(state.filled) if slot != oldest]
        if not kept:
            return None
        steps, changes = (
            torch.stack([t[k].detach()[rows] for k in kept], 1)
            if isinstance(t, list)
            else t[rows][:, kept]
            for t in (state.steps, state.changes)
        )
        if state.forgotten is not None:
            changes = changes.masked_fill(state.forgotten[rows][:, kept, None], 0.0)
        return steps - self.damping * changes, changes

    def renew(self, state: Differences, places: Tensor, point: Evaluation) -> None:
        """Empty the history of the rows; their next difference is zero, which counts nothing."""
        assert state.last is not None
        state.last = put_rows(state.last, point, places)
        unit = torch.eye(state.kept, dtype=state.gram.dtype, device=state.gram.device)
        state.gram[places] = unit
        for kept in (state.steps, state.changes):
            assert isinstance(kept, Tensor)
            kept.index_fill_(0, places, 0)

    def ridge(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the weight of the regularization and a number to add to the diagonal.

        A rejected step leaves a zero difference with a zero row and column: adding the smallest normal number
        keeps the matrix regular and gives that difference the weight zero.
        """
        limits = torch.finfo(dtype)
        return max(self.regularization, 4 * limits.eps), limits.tiny


@dataclass
class Differences:
    """Differences of the last steps; the newest one overwrites the oldest.

    They lie in one buffer (B, m, D) or, for autograd, which would copy a buffer at every step, in a list of
    tensors (B, D).
    """

    kept: int  # slots at most
    gram: Tensor  # (B, m, m) dR^T dR with its ridge
    steps: Tensor | list[Tensor]  # dZ + damping dR
    changes: Tensor | list[Tensor]  # dR
    last: Evaluation | None = None  # None before the first step
    count: int = 0  # differences made so far
    forgotten: Tensor | None = None  # (B, m) bool, differences that no longer count; None: all do

    @property
    def filled(self) -> int:
        """Slots in use."""
        return min(self.count, self.kept)

    @property
    def newest(self) -> int:
        """The slot of the newest difference."""
        return (self.count - 1) % self.kept

    def remember(self, step: Tensor, change: Tensor) -> None:
        self.count += 1
        if self.forgotten is not None:
            self.forgotten = self.forgotten.clone()  # autograd may have saved it
            self.forgotten[:, self.newest] = False
        for kept, new in ((self.steps, step), (self.changes, change)):
            if isinstance(kept, list):
                kept[self.newest : self.newest + 1] = [new]
            else:
                kept[:, self.newest] = new

    def products(self, vector: Tensor) -> Tensor:
        """(B, k) inner products of the changes with a vector (B, D)."""
        if isinstance(self.changes, list):
            wide = vector.to(self.gram.dtype)
            found = torch.stack([(each.to(wide.dtype) * wide).sum(1) for each in self.changes], 1)
        else:
            found = inner_products(self.changes[:, : self.filled], vector)
        if self.forgotten is None:
            return found
        return found.masked_fill(self.forgotten[:, : self.filled], 0.0)

    def subtracted(self, start: Tensor, weights: Tensor) -> Tensor:
        """``start - sum_j weights_j step_j``, (B, D)."""
        if not isinstance(self.steps, list):
            return combine(start, weights, self.steps[:, : self.filled], sign=-1)
        for weight, step in zip(weights.to(start.dtype).unbind(1), self.steps, strict=True):
            start = start - weight.unsqueeze(1) * step
        return start

    def forget(self, rows: Tensor) -> None:
        """Drop the history of the rows (B,) bool whose accelerated step was rejected."""
        unit = torch.eye(self.kept, dtype=self.gram.dtype, device=self.gram.device)
        self.gram = where_rows(rows, unit.expand_as(self.gram), self.gram)
        every = rows[:, None].expand(-1, self.kept)
        self.forgotten = every if self.forgotten is None else self.forgotten | every

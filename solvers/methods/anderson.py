"""Anderson acceleration (type II)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from solvers.core.arrays import (
    combine_all,
    fits_numpy,
    inner_products_of,
    small_dtype,
)
from solvers.core.checks import require_count, require_number
from solvers.core.device import traced
from solvers.core.guards.native import native_steps
from solvers.core.problem import Problem
from solvers.core.rows import Point, clear_rows, where_rows, write_slot
from solvers.core.solver import Solver, Turn
from solvers.methods.history import (
    combine,
    inner_products,
    solve_small,
    write_symmetric,
)
from solvers.native.steps import MOST, Ring, Steps, anderson_step


@dataclass(frozen=True)
class Anderson(Solver):
    r"""Anderson acceleration (type II): the secant step of least residual.

    With residuals ``r_k = f(z_k) - z_k``, differences ``dZ, dR`` of the last ``memory`` steps and
    ``c = argmin |r_k - dR c|^2`` (ridge included)::

        z_{k+1} = z_k - dZ c + damping (r_k - dR c)

    The Gram matrix ``dR^T dR`` gains one row and column per step. The ridge multiplies its diagonal,
    so that the steps do not depend on the scale of the problem. A row whose step was rejected forgets
    its differences.

    Args:
        memory: number of differences kept, >= 1.
        damping: mixing in (0, 2].
        regularization: relative ridge, >= 0; raised to the rounding level of the Gram matrix.

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
    49 (2011), eq. 2.1, https://doi.org/10.1137/10078356X; the type after Fang and Saad (2009),
    https://doi.org/10.1002/nla.617.
    """

    memory: int = 10
    damping: float = 1.0
    regularization: float = 1e-12

    traceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count("memory", self.memory)
        require_number("damping", self.damping, low=0.0, high=2.0, closed=False)
        require_number("regularization", self.regularization, low=0.0, high=1.0)

    def init(self, point: Point, problem: Problem) -> AndersonState | TracedAndersonState:
        batch, size = point.z.shape
        kept = min(self.memory, size)  # more differences than dimensions are dependent
        dtype = small_dtype(point.z.dtype)
        if traced():
            gram = torch.zeros(batch, 0, 0, dtype=dtype, device=point.z.device)
            return TracedAndersonState(kept, [], [], gram)
        return AndersonState(
            steps=point.z.new_empty(batch, kept, size),  # of which only filled slots are read
            changes=point.z.new_empty(batch, kept, size),
            gram=torch.zeros(batch, kept, kept, dtype=dtype, device=point.z.device),
            last=None,
        )

    def step(self, state: AndersonState | TracedAndersonState, turn: Turn) -> Tensor:
        """Remember the newest difference and mix all that are kept."""
        if isinstance(state, TracedAndersonState):
            return self._step_of_program(state, turn)
        steps = native_steps(state.steps) if state.steps.shape[1] <= MOST else None
        if steps is not None:
            return self._native_step(steps, state, turn)
        if fits_numpy(state.steps):
            return self._step_on_host(state, turn)
        z, residual = turn.current.z, turn.current.residual
        last = state.last
        state.last = turn.current
        if last is not None:
            self._remember(state, turn.current, last)
        if turn.accepted is not None:
            state.forget(~turn.accepted)
        del last  # its states are not needed while the next one is made
        damped = z.add(residual, alpha=self.damping)
        filled = state.filled
        if filled == 0:
            return damped
        right = inner_products(state.changes[:, :filled], residual)
        weights = solve_small(state.gram[:, :filled, :filled], right)
        return combine(damped, weights, state.steps[:, :filled], sign=-1)

    def _step_of_program(self, state: TracedAndersonState, turn: Turn) -> Tensor:
        """:meth:`step` within a program."""
        current, last = turn.current, state.last
        state.last = current
        if last is not None:
            change = current.residual - last.residual
            step = (current.z - last.z).add(change, alpha=self.damping)
            state.remember(step, change, *self.ridge(state.gram.dtype))
        if turn.accepted is not None:
            state.forget(~turn.accepted)
        damped = current.z.add(current.residual, alpha=self.damping)
        if not state.changes:
            return damped
        right = inner_products_of(state.changes, current.residual)
        return combine_all(damped, solve_small(state.gram, right), state.steps, sign=-1)

    def _step_on_host(self, state: AndersonState, turn: Turn) -> Tensor:
        """:meth:`step` in NumPy, whose calls cost less: they are most of a small problem's step."""
        last, state.last = state.last, turn.current
        z, residual = turn.current.z.numpy(), turn.current.residual.numpy()
        damped = z + (residual if self.damping == 1 else self.damping * residual)
        if last is None:
            return torch.from_numpy(damped)
        slot, accepted = state.next_slot(), turn.accepted
        filled = state.filled
        changes, steps = state.changes.numpy()[:, :filled], state.steps.numpy()[:, :filled]
        step = steps[:, slot]
        change = np.subtract(residual, last.residual.numpy(), out=changes[:, slot])
        np.subtract(z, last.z.numpy(), out=step)
        step += change if self.damping == 1 else self.damping * change
        row = np.matmul(changes, change[:, :, None])[:, :, 0]
        ridge, tiny = self.ridge(state.gram.dtype)
        row[:, slot] = row[:, slot] * ridge + tiny
        gram = state.gram.numpy()
        gram[:, slot, :filled] = gram[:, :filled, slot] = row
        if accepted is not None:
            state.forget(~accepted)
        right = np.matmul(changes, residual[:, :, None])[:, :, 0]
        weights = solve_small(state.gram[:, :filled, :filled], torch.from_numpy(right))
        damped -= np.matmul(weights.numpy()[:, None], steps)[:, 0]
        return torch.from_numpy(damped)

    def _native_step(self, steps: Steps, state: AndersonState, turn: Turn) -> Tensor:
        """:meth:`step` in C++."""
        last, state.last = state.last, turn.current
        z, residual, accepted = turn.current.z, turn.current.residual, turn.accepted
        ring = self._ring(state)
        if last is not None:
            before = (last.z.contiguous(), last.residual.contiguous())
            ring.z, ring.residual = (tensor.data_ptr() for tensor in before)
            state.next_slot()
        candidate = anderson_step(steps, ring, z, residual, first=last is None)
        if accepted is not None:
            state.forget(~accepted)  # the loop has a step of its own for these rows
        return candidate

    def ring(self, state: AndersonState) -> Ring | None:
        if state.steps.shape[1] > MOST:
            return None
        return self._ring(state)

    def before(self, state: AndersonState) -> tuple[Point | None, int]:
        return state.last, state.count

    def stepped(self, state: AndersonState, point: Point) -> None:
        if state.last is not None:
            state.next_slot()
        state.last = point

    def _ring(self, state: AndersonState) -> Ring:
        ridge, tiny = self.ridge(state.gram.dtype)
        arrays = (state.steps, state.changes, state.gram)
        addresses = [array.data_ptr() for array in arrays]
        numbers = (self.damping, ridge, tiny)
        return Ring(*addresses, None, None, state.steps.shape[1], state.count, False, *numbers)

    def ridge(self, dtype: torch.dtype) -> tuple[float, float]:
        """Factor of the Gram matrix' diagonal, and what is added to it.

        The ridge is relative to each diagonal entry: a scaling of the problem scales it too. The
        smallest normal number gives a zero difference (a rejected step) the weight zero.
        """
        limits = torch.finfo(dtype)
        return 1 + max(self.regularization, 4 * limits.eps), limits.tiny

    def _remember(self, state: AndersonState, point: Point, last: Point) -> None:
        """Store the newest difference in the oldest slot and refresh its row of the Gram matrix."""
        slot = state.next_slot()
        filled = state.filled
        if torch.is_grad_enabled():
            change = point.residual - last.residual
            step = (point.z - last.z).add(change, alpha=self.damping)
            state.steps = write_slot(state.steps, slot, step)
            state.changes = write_slot(state.changes, slot, change)
        else:
            change, step = state.changes[:, slot], state.steps[:, slot]
            torch.sub(point.residual, last.residual, out=change)
            torch.sub(point.z, last.z, out=step)
            step.add_(change, alpha=self.damping)
        row = inner_products(state.changes[:, :filled], state.changes[:, slot])
        state.gram = write_symmetric(state.gram, slot, row, *self.ridge(row.dtype))


@dataclass
class AndersonState:
    """Differences of the last steps, as ring buffers of m slots."""

    steps: Tensor  # (B, m, D) dZ + damping dR
    changes: Tensor  # (B, m, D) dR
    gram: Tensor  # (B, m, m) dR^T dR with its ridge
    last: Point | None  # None before the first step
    count: int = 0  # differences made so far
    filled: int = 0  # slots in use

    def next_slot(self) -> int:
        """The slot of the newest difference, which the count takes in."""
        kept = self.steps.shape[1]
        slot = self.count % kept
        self.count += 1
        self.filled = min(self.count, kept)
        return slot

    def forget(self, rows: Tensor) -> None:
        """Drop the history of the rows (B,) bool whose accelerated step was rejected."""
        kept = self.gram.shape[1]
        unit = torch.eye(kept, dtype=self.gram.dtype, device=self.gram.device)
        self.gram = where_rows(rows, unit.expand_as(self.gram), self.gram)
        self.steps = clear_rows(self.steps, rows)
        self.changes = clear_rows(self.changes, rows)


@dataclass
class TracedAndersonState:
    """:class:`AndersonState` in a program: the vectors (B, D) of k slots, the oldest first."""

    kept: int  # slots at most
    steps: list[Tensor]
    changes: list[Tensor]
    gram: Tensor  # (B, k, k) with its ridge
    last: Point | None = None

    def remember(self, step: Tensor, change: Tensor, ridge: float, tiny: float) -> None:
        """Take the newest difference in the place of the oldest one."""
        if len(self.changes) == self.kept:
            self.steps, self.changes = self.steps[1:], self.changes[1:]
            self.gram = self.gram[:, 1:, 1:]
        self.steps, self.changes = [*self.steps, step], [*self.changes, change]
        row = inner_products_of(self.changes, change)
        row = torch.cat((row[:, :-1], row[:, -1:] * ridge + tiny), 1)
        upper = torch.cat((self.gram, row[:, :-1].unsqueeze(2)), 2)
        self.gram = torch.cat((upper, row.unsqueeze(1)), 1)

    def forget(self, rows: Tensor) -> None:
        """:meth:`AndersonState.forget`."""
        unit = torch.eye(len(self.changes), dtype=self.gram.dtype, device=self.gram.device)
        self.gram = where_rows(rows, unit.expand_as(self.gram), self.gram)
        self.steps = [where_rows(rows, torch.zeros_like(t), t) for t in self.steps]
        self.changes = [where_rows(rows, torch.zeros_like(t), t) for t in self.changes]

"""Broyden's good method in product form, with one stored vector per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from solvers.core.checks import require_count, require_number
from solvers.core.loop import Solver, SolverInput
from solvers.core.problem import Problem
from solvers.core.rows import (
    Evaluation,
    History,
    Recent,
    clear_rows,
    combine,
    inner_products,
    where_rows,
)

FIRST_CAPACITY = 8  # vectors that the storage holds at first
NEARLY_SINGULAR = 1e-3  # |1 - s.p / |s|^2| below which a row restarts


@dataclass(frozen=True)
class Broyden(Solver):
    r"""Broyden's first ("good") method with limited memory.

    For full quasi-Newton steps ``s_j`` the inverse Jacobian is a product of rank-one factors, so the
    next step depends only on the previous steps (Kelley, sec. 7.3)::

        p = prod_{j<k-1} (I + s_{j+1} s_j^T / |s_j|^2) damping r_k
        s_k = p / (1 - s_{k-1}.p / |s_{k-1}|^2)

    One small triangular system applies the factors. Storage grows with the number of steps, up to
    ``memory`` vectors; then the method restarts. A point whose residual exceeds those of the last five
    accepted points is rejected, and the sample takes the step ``z + r`` instead. A sample whose step was
    rejected, or whose update is nearly singular, restarts individually.

    Args:
        memory: number of stored steps, >= 2.
        damping: initial inverse Jacobian ``-damping I``, in (0, 2].

    Source: C. T. Kelley, "Iterative Methods for Linear and Nonlinear Equations" (SIAM 1995), 7.3,
    https://doi.org/10.1137/1.9781611970944.
    """

    memory: int = 100
    damping: float = 1.0

    window: ClassVar[int] = 5

    def __post_init__(self) -> None:
        require_count("memory", self.memory, low=2)
        require_number("damping", self.damping, low=0.0, high=2.0, closed=False)

    def init(self, point: Evaluation, problem: Problem) -> BroydenState:
        units = History.empty(point.z, self.memory, FIRST_CAPACITY)
        return BroydenState(units, lengths=units.gram[:, :0, 0])

    def pairs(self, state: BroydenState, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        return state.recent.pairs(rows)

    def step(self, state: BroydenState, inputs: SolverInput) -> Tensor:
        if state.units.count >= self.memory:
            state.units.count = 0
        current = inputs.current
        state.recent.note(current)
        if state.replaced is not None:
            # The loop moved these rows by a fall-back step, which has no secant pair.
            state.restart(state.replaced)
        state.replaced = None if inputs.accepted is None else ~inputs.accepted
        if state.replaced is not None:
            state.restart(state.replaced)
        start = current.residual if self.damping == 1.0 else self.damping * current.residual
        step = start if state.units.count == 0 else self._step(state, start)
        length = torch.linalg.vector_norm(step, dim=1, dtype=state.lengths.dtype)
        tiny = torch.finfo(length.dtype).tiny
        state.lengths = torch.cat((state.lengths[:, : state.units.count], length[:, None]), 1)
        state.units.write(step / length.clamp_min(tiny).to(step.dtype)[:, None])
        return current.z + step

    def _step(self, state: BroydenState, start: Tensor) -> Tensor:
        """Apply the product form to ``start`` = -B_0^-1 r."""
        count = state.units.count
        units, lengths = state.units.vectors[:, :count], state.lengths[:, :count]
        along = inner_products(units, start)  # (B, k): s_j . p_0 / |s_j|
        last, product = along[:, -1], start
        if count > 1:
            weights = self._weights(state, along[:, :-1], lengths)
            product = combine(start, weights, units[:, 1:])
            last = last + (weights * state.units.gram[:, count - 1, 1:count]).sum(1)
        # 1 - s.p / |s|^2 for the newest step; zero lengths mark a restarted row.
        newest = lengths[:, -1]
        safe = torch.where(newest > 0, newest, 1.0)
        denominator = 1.0 - torch.where(newest > 0, last / safe, 0.0)
        good = denominator.abs() > NEARLY_SINGULAR
        if not bool(good.all()):
            state.restart(~good)
            product = where_rows(good, product, start)
            denominator = torch.where(good, denominator, 1.0)
        return product / denominator.to(start.dtype).unsqueeze(1)

    def _weights(self, state: BroydenState, along: Tensor, lengths: Tensor) -> Tensor:
        """(B, k-1) weights e_j of ``p = p_0 + sum_j e_j s_{j+1} / |s_{j+1}|``."""
        count = along.shape[1]
        before, after = lengths[:, :-1], lengths[:, 1:]
        alive = (before > 0) & (after > 0)
        inverse_ratio = torch.where(alive, before / torch.where(alive, after, 1.0), 1.0)
        coupling = state.units.gram[:, :count, 1 : count + 1].tril(-1)
        system = torch.diag_embed(inverse_ratio) - coupling
        right = torch.where(alive, along, 0.0).unsqueeze(2)
        weights = torch.linalg.solve_triangular(system, right, upper=False).squeeze(2)
        return torch.where(alive, weights, 0.0)


@dataclass
class BroydenState:
    """Previous steps as unit vectors with their lengths."""

    units: History
    lengths: Tensor  # (B, k) of the steps
    # (B,) bool, rows whose last candidate the loop replaced by a safer one.
    replaced: Tensor | None = None
    recent: Recent = field(default_factory=Recent)

    def restart(self, rows: Tensor) -> None:
        """Discard the history of some rows (B,) bool."""
        self.lengths = clear_rows(self.lengths, rows)
        self.units.vectors = clear_rows(self.units.vectors, rows)
        self.units.gram = clear_rows(self.units.gram, rows)

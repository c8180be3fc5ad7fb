"""Limited-memory BFGS for energies, with a line search per sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from solvers.core.checks import require_count
from solvers.core.loop import Solver, SolverInput
from solvers.core.problem import Problem
from solvers.core.rows import (
    Evaluation,
    History,
    combine,
    inner_products,
    put_rows,
    small_dtype,
    where_rows,
)
from solvers.core.safeguard import SHORTEST, interpolation, slope_of

CURVATURE = 1e-6  # smallest cosine between s and y of a stored pair
PAIRS, SMALL, MORE_PAIRS = 6, 1024, 10  # stored pairs; more for states of at most SMALL numbers
FIRST_CAPACITY = 4  # pairs that the storage holds at first
QUADRATIC = 0.05  # largest deviation from a quadratic at which a rejected trial updates H
NOISE = 0.01  # deviations below this share of the energy may be noise of low precision
ABSURD = 16  # a first step that predicts a decrease of so many times the energy is shortened,
LONG = 0.5  # ... if it is longer than this share of the state


@dataclass(frozen=True)
class LBFGS(Solver):
    r"""Limited-memory BFGS for an energy, in the compact representation with Armijo's rule.

    With ``memory`` pairs ``s = dz, y = dg`` scaled to ``s.y = 1``, ``R`` the upper triangle (in time)
    of ``S^T Y`` and ``g = dE/dz``::

        H g = gamma g + S u - gamma Y w,   R w = S^T g,   R^T u = (I + gamma Y^T Y) w - gamma Y^T g

    The first trial is the unit step ``f(z) = z + r``. If ``|r.g| > 16 |E|`` and
    ``2 |r| > max(|z|, sqrt D)``, it predicts a decrease of many times the energy and is shortened to
    ``z + t r`` with ``t = 2 |E| / |r.g|``, the step to the minimum 0 of a parabola. Later trials
    ``z - H g`` are accepted if they satisfy Armijo's rule. If E is almost quadratic between the points
    of a rejected trial (``dE = (g + g').s / 2`` to 5 % of ``y.s``, the step at most ten times too long),
    the trial updates ``H``, and a new direction from the old point is tried once. Otherwise
    interpolation shortens the step until it is accepted. Each evaluation computes one energy and one
    gradient.

    Args:
        memory: number of stored pairs, >= 1; None for 10 if a state has at most 1024 numbers, else 6.

    Source: Byrd, Nocedal and Schnabel, Math. Programming 63 (1994), theorem 2.2 and eq. 3.1,
    https://doi.org/10.1007/BF01582063.
    """

    memory: int | None = None

    needs_energy: ClassVar[bool] = True
    searches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.memory is not None:
            require_count("memory", self.memory)

    def init(self, point: Evaluation, problem: Problem) -> LBFGSState:
        memory = self.memory or (MORE_PAIRS if point.z.shape[1] <= SMALL else PAIRS)
        pairs = History.empty(point.z, 2 * memory, 2 * FIRST_CAPACITY)
        gamma, length = _first_scales(point)
        return LBFGSState(pairs, gamma, point, point.residual, length, problem.gradient_step)

    def renew(self, state: LBFGSState, places: Tensor, point: Evaluation) -> None:
        """Empty the pairs of the rows, and let their next step be a first one."""
        gamma, length = _first_scales(point)
        state.gamma = put_rows(state.gamma, gamma, places)
        state.length = put_rows(state.length, length, places)
        state.direction = put_rows(state.direction, point.residual, places)
        state.point = put_rows(state.point, point, places)
        for kept in (state.pairs.vectors, state.pairs.gram):
            kept.index_fill_(0, places, 0)
        state.renewed = places

    def pairs(self, state: LBFGSState, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        kept = state.pairs.vectors[rows, : state.pairs.filled]
        if state.pairs.filled == 0 or state.step_size is None:
            return None
        return kept[:, 0::2], kept[:, 1::2] * -state.step_size

    def step(self, state: LBFGSState, inputs: SolverInput) -> Tensor:
        current, trial, accepted = inputs.current, inputs.trial, inputs.accepted
        if trial is state.point:  # the first evaluation
            return state.candidate()
        factor = None if accepted is None else interpolation(current, trial)
        first = state if state.renewed is None else replace(state)
        stored = self._store_pair(state, trial, accepted, factor)
        direction = self._direction(state, _gradient(current))
        if accepted is None or factor is None:
            state.length = torch.ones_like(state.length)
        else:
            renew = accepted | (stored & (inputs.rows.rejections == 1))
            shorter = state.length * factor.to(state.length.dtype)
            direction = where_rows(renew, direction, state.direction)
            state.length = torch.where(renew, 1.0, shorter)
        state.point, state.direction = current, direction
        if state.renewed is not None:
            state.gamma = put_rows(state.gamma, first.gamma, state.renewed)
            state.direction = put_rows(state.direction, first.direction, state.renewed)
            state.length = put_rows(state.length, first.length, state.renewed)
            state.renewed = None
        return state.candidate()

    def _store_pair(
        self, state: LBFGSState, trial: Evaluation, accepted: Tensor | None, factor: Tensor | None
    ) -> Tensor:
        """Store the pair of the last trial in the rows (B,) bool where its curvature is positive."""
        s, y = trial.z - state.point.z, _gradient(trial) - _gradient(state.point)
        dtype = state.gamma.dtype
        along, squares = (s * y).sum(1, dtype=dtype), (s * s).sum(1, dtype=dtype)
        changes = (y * y).sum(1, dtype=dtype)
        good = along > CURVATURE * (squares * changes).sqrt()  # False where not finite
        good = good & torch.isfinite(changes)
        if accepted is not None and factor is not None:
            near = (factor > SHORTEST) & _almost_quadratic(trial, state.point, along)
            good = good & (accepted | near)
        scale = torch.where(good, along, 1.0).rsqrt().to(s.dtype).unsqueeze(1)
        if not bool(good.all()):
            s, y = (where_rows(good, t, torch.zeros_like(t)) for t in (s, y))
        state.pairs.write(s * scale, y * scale)
        safe = torch.where(good, changes, 1.0)
        # After non-positive curvature along an accepted step, the next step is longer.
        longer = 2.0 if accepted is None else torch.where(accepted, 2.0, 1.0)
        state.gamma = torch.where(good, along / safe, longer * state.gamma)
        return good

    def _direction(self, state: LBFGSState, gradient: Tensor) -> Tensor:
        """Return ``-H g``, or ``-gamma g`` in rows where rounding makes it no descent direction."""
        filled, gamma = state.pairs.filled, state.gamma.unsqueeze(1)
        pairs = state.pairs.vectors[:, :filled]
        along = inner_products(pairs, gradient)
        upper = state.upper_triangle()
        changes = state.pairs.gram[:, 1:filled:2, 1:filled:2]
        w = torch.linalg.solve_ex(upper, along[:, 0::2])[0]
        right = w + gamma * (torch.bmm(changes, w.unsqueeze(2)).squeeze(2) - along[:, 1::2])
        u = torch.linalg.solve_ex(upper.mT, right)[0]
        weights = torch.stack([u, -gamma * w], dim=2).flatten(1)
        steepest = gamma.to(gradient.dtype) * gradient
        ascent = combine(steepest, weights, pairs)
        good = (ascent * gradient).sum(1) > 0
        if not bool(good.all()):
            ascent = where_rows(good, ascent, steepest)
        return -ascent


@dataclass
class LBFGSState:
    """The pairs, and the line search: the last trial was ``point.z + length direction``."""

    pairs: History  # s, y, s, y, ...
    gamma: Tensor  # (B,) scale of the initial inverse Hessian
    point: Evaluation
    direction: Tensor
    length: Tensor
    step_size: Any  # of the map, r = -step_size g, if it is a gradient step
    renewed: Tensor | None = None  # rows whose next step is a first one

    def candidate(self) -> Tensor:
        """The next trial (B, D)."""
        return self.point.z + self.length.to(self.point.z.dtype).unsqueeze(1) * self.direction

    def upper_triangle(self) -> Tensor:
        """R (B, m, m): s_i.y_j where i is not younger than j, unit diagonal in empty slots."""
        pairs, filled = self.pairs, self.pairs.filled
        slots = torch.arange(filled // 2, device=pairs.gram.device)
        age = (pairs.count // 2 - 1 - slots) % (pairs.memory // 2)  # 0 for the newest
        older = age[:, None] >= age[None, :]
        upper = torch.where(older, pairs.gram[:, 0:filled:2, 1:filled:2], 0.0)
        empty = torch.diag_embed((upper.diagonal(dim1=1, dim2=2) == 0).to(upper.dtype))
        return upper + empty


def _first_scales(point: Evaluation) -> tuple[Tensor, Tensor]:
    """(B,) scale of the initial inverse Hessian and length of the first step."""
    dtype, gradient = small_dtype(point.z.dtype), _gradient(point)
    # The residual r = f(z) - z sets the first scale: r = -gamma g for a gradient step.
    squares = (gradient * gradient).sum(1, dtype=dtype)
    along = -(point.residual * gradient).sum(1, dtype=dtype)
    gamma = torch.where((squares > 0) & (along > 0), along / squares, 1.0)
    assert point.energy is not None
    z, size = point.z.detach(), point.energy.detach().abs().to(dtype)
    # The energy may be near zero because of its additive constant. Only steps of about the state's size
    # or more are shortened here; the line search corrects short steps.
    extent = torch.linalg.vector_norm(z, dim=1, dtype=dtype).clamp_min(z.shape[1] ** 0.5)
    absurd = (along > ABSURD * size) & (size > 0) & (point.norm.to(dtype) > LONG * extent)
    return gamma, torch.where(absurd, 2 * size / torch.where(absurd, along, 1.0), 1.0)


def _almost_quadratic(trial: Evaluation, start: Evaluation, along: Tensor) -> Tensor:
    """(B,) bool: the energies of both points and their slopes lie on one parabola; ``along = s.y``."""
    assert trial.energy is not None and start.energy is not None
    change = (trial.energy - start.energy).detach().to(along.dtype)
    mean = slope_of(trial, start).to(along.dtype) + 0.5 * along
    noise = NOISE * start.energy.detach().abs().to(along.dtype)
    return (change - mean).abs() <= QUADRATIC * along + noise


def _gradient(point: Evaluation) -> Tensor:
    if point.gradient is None:
        raise ValueError("LBFGS needs the energy's gradient, but EnergyUpdate.joint returned None")
    return point.gradient

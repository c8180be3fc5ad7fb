"""Limited-memory BFGS for energies, with a line search per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from solvers.core.checks import require_count
from solvers.core.device import maybe_any
from solvers.core.problem import Problem
from solvers.core.rows import Point, small_dtype, where_rows, write_slot
from solvers.core.safeguard import interpolation
from solvers.core.solver import Solver, Turn
from solvers.methods.history import combine, inner_products

CURVATURE = 1e-6  # smallest cosine between s and y of a pair that is kept


@dataclass(frozen=True)
class LBFGS(Solver):
    r"""Quasi-Newton descent of an energy with Armijo's rule, in the compact representation.

    With ``memory`` pairs ``s = dz, y = dg`` scaled to ``s.y = 1``, ``R`` the upper triangle (in time)
    of ``S^T Y`` and ``g = dE/dz``::

        H g = gamma g + S u - gamma Y w,   R w = S^T g,   R^T u = (I + gamma Y^T Y) w - gamma Y^T g

    The trial ``z - H g`` is accepted where it satisfies Armijo's rule. The pair of a rejected trial
    corrects ``H`` too, and a new direction is tried once from the old point; after that the step along
    the same direction is shortened by interpolation until it is accepted. An evaluation is one energy
    and one gradient.

    Args:
        memory: number of pairs kept, >= 1.

    Source: Byrd, Nocedal and Schnabel, Math. Programming 63 (1994), theorem 2.2 and eq. 3.1,
    https://doi.org/10.1007/BF01582063.
    """

    memory: int = 6

    needs_energy: ClassVar[bool] = True
    searches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count("memory", self.memory)

    def init(self, point: Point, problem: Problem) -> LBFGSState:
        batch, size = point.z.shape
        kept = min(self.memory, size)
        dtype = small_dtype(point.z.dtype)
        small = {"dtype": dtype, "device": point.z.device}
        gradient = _gradient(point)
        # The residual r = f(z) - z sets the first scale: r = -gamma g for a gradient step.
        squares = (gradient * gradient).sum(1, dtype=dtype)
        along = -(point.residual * gradient).sum(1, dtype=dtype)
        gamma = torch.where((squares > 0) & (along > 0), along / squares, 1.0)
        return LBFGSState(
            pairs=point.z.new_zeros(batch, 2 * kept, size),
            products=torch.zeros(batch, 2 * kept, 2 * kept, **small),
            gamma=gamma,
            point=point,
            direction=point.residual,
            length=torch.ones(batch, **small),
        )

    def step(self, state: LBFGSState, turn: Turn) -> Tensor:
        current, trial, accepted = turn.current, turn.trial, turn.accepted
        if not state.started:
            state.started = True
            return current.z + state.direction
        stored = self._store_pair(state, trial, accepted)
        direction = self._direction(state, _gradient(current))
        if accepted is None:
            state.length = torch.ones_like(state.length)
        else:
            renew = accepted | (stored & (turn.rejections == 1))
            shorter = state.length * interpolation(current, trial).to(state.length.dtype)
            direction = where_rows(renew, direction, state.direction)
            state.length = torch.where(renew, 1.0, shorter)
        state.point, state.direction = current, direction
        return current.z + state.length.to(current.z.dtype).unsqueeze(1) * direction

    def _store_pair(self, state: LBFGSState, trial: Point, accepted: Tensor | None) -> Tensor:
        """Store the pair of the last trial where it has positive curvature; (B,) bool."""
        kept = state.pairs.shape[1] // 2
        s, y = trial.z - state.point.z, _gradient(trial) - _gradient(state.point)
        dtype = state.gamma.dtype
        along, squares = (s * y).sum(1, dtype=dtype), (s * s).sum(1, dtype=dtype)
        changes = (y * y).sum(1, dtype=dtype)
        good = along > CURVATURE * (squares * changes).sqrt()  # False where not finite
        good = good & torch.isfinite(changes)
        scale = torch.where(good, along, 1.0).rsqrt().to(s.dtype).unsqueeze(1)
        if maybe_any(~good):
            s, y = (where_rows(good, t, torch.zeros_like(t)) for t in (s, y))
        slot = state.count % kept
        state.count += 1
        state.pairs = write_slot(write_slot(state.pairs, slot, s * scale), kept + slot, y * scale)
        state.update_products(slot)
        safe = torch.where(good, changes, 1.0)
        # Non-positive curvature along an accepted step: a longer one next time.
        longer = 2.0 if accepted is None else torch.where(accepted, 2.0, 1.0)
        state.gamma = torch.where(good, along / safe, longer * state.gamma)
        return good

    def _direction(self, state: LBFGSState, gradient: Tensor) -> Tensor:
        """``-H g``, or ``-gamma g`` in rows where rounding makes that no descent direction."""
        kept = state.pairs.shape[1] // 2
        gamma = state.gamma.unsqueeze(1)
        along = inner_products(state.pairs, gradient)
        upper = state.upper_triangle()
        changes = state.products[:, kept:, kept:]
        w = torch.linalg.solve_ex(upper, along[:, :kept])[0]
        right = w + gamma * (torch.bmm(changes, w.unsqueeze(2)).squeeze(2) - along[:, kept:])
        u = torch.linalg.solve_ex(upper.mT, right)[0]
        weights = torch.cat([u, -gamma * w], dim=1)
        steepest = gamma.to(gradient.dtype) * gradient
        ascent = combine(steepest, weights, state.pairs)
        good = (ascent * gradient).sum(1) > 0
        if maybe_any(~good):
            ascent = where_rows(good, ascent, steepest)
        return -ascent


@dataclass
class LBFGSState:
    """The pairs, and the line search: the last trial was ``point.z + length direction``."""

    pairs: Tensor  # (B, 2m, D) [S, Y], each a ring buffer
    products: Tensor  # (B, 2m, 2m) inner products of the pairs
    gamma: Tensor  # (B,) scale of the initial inverse Hessian
    point: Point
    direction: Tensor
    length: Tensor
    count: int = 0  # pairs made so far
    started: bool = False  # the first trial has been proposed

    def update_products(self, slot: int) -> None:
        """Recompute the products with the pair in ``slot``."""
        kept = self.pairs.shape[1] // 2
        products = self.products.clone() if torch.is_grad_enabled() else self.products
        own = slice(slot, None, kept)  # s and y of the slot
        new = self.pairs[:, own].to(products.dtype)
        rows = torch.bmm(new, self.pairs.to(products.dtype).mT)
        products[:, own] = rows
        products[:, :, own] = rows.mT
        self.products = products

    def upper_triangle(self) -> Tensor:
        """R (B, m, m): s_i.y_j where i is not younger than j, unit diagonal in empty slots."""
        kept = self.pairs.shape[1] // 2
        slots = torch.arange(kept, device=self.products.device)
        age = (self.count - 1 - slots) % kept  # 0 for the newest
        older = age[:, None] >= age[None, :]
        upper = torch.where(older, self.products[:, :kept, kept:], 0.0)
        empty = torch.diag_embed((upper.diagonal(dim1=1, dim2=2) == 0).to(upper.dtype))
        return upper + empty


def _gradient(point: Point) -> Tensor:
    if point.gradient is None:
        raise ValueError("LBFGS needs the gradient of the energy; EnergyUpdate.joint returned None")
    return point.gradient

"""Newton-Krylov method: inexact Newton steps from Jacobian-vector products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from solvers.core.checks import require_kind, require_number
from solvers.core.loop import DIVERGENCE, Solver, SolverInput
from solvers.core.problem import Problem
from solvers.core.rows import Evaluation, merge_rows, scaled_norm, select_rows, where_rows
from solvers.core.safeguard import ARMIJO
from solvers.krylov import CG, GMRES, LINEAR, MINRES, LinearSolver

REACH = 1e3  # largest iterate of a map, against the size of the start, to which a Newton step leads
DENSE = 30  # unknowns up to which the Jacobian is computed as a matrix


@dataclass(frozen=True)
class Newton(Solver):
    r"""Inexact Newton method for ``r(z) = f(z) - z = 0``.

    Each step solves ``(I - J) s = r`` to ``|r - (I - J) s| <= eta |r|`` by a Krylov method and moves
    by ``t s``. With an energy the step is truncated at non-positive curvature and must satisfy
    Armijo's rule; without one it must reduce ``|r|``, otherwise ``t`` is halved. The forcing term is
    ``eta_k = clamp(0.9 (|r_k| / |r_{k-1}|)^2, smallest, forcing)``. A step of a map that would lead beyond a
    thousand times the size of the start is replaced by a plain one. The estimated error counts the full step,
    of which the line search may leave a part.

    Products with J count as evaluations. For at most 30 unknowns, and without an energy, the Jacobian is
    computed as a matrix by one vector-Jacobian product a row. Otherwise a product with J is one
    vector-Jacobian product if J is symmetric, else reverse over reverse, for which ``f`` must be twice
    differentiable. With ``compact=False`` the evaluations of one sample count for all samples that are still
    running.

    Args:
        linear: Krylov solver of the steps, with a ``preconditioner`` for ``I - J`` if you have one. None: for
            a symmetric J, CG if there is an energy and MINRES otherwise; else GMRES(restart=30).
        forcing: largest relative residual of the linear solves, in (0, 1).

    Source: Dembo, Eisenstat and Steihaug, "Inexact Newton methods", SIAM J. Numer. Anal. 19 (1982),
    https://doi.org/10.1137/0719025; Eisenstat and Walker, SIAM J. Sci. Comput. 17 (1996), choice 2,
    https://doi.org/10.1137/0917003.
    """

    linear: LinearSolver | type[LinearSolver] | str | None = None
    forcing: float = 0.1

    searches: ClassVar[bool] = True
    known: ClassVar[int] = 1  # it knows all directions at a point

    def __post_init__(self) -> None:
        linear = require_kind("linear", self.linear, LinearSolver, LINEAR, optional=True)
        object.__setattr__(self, "linear", linear)
        require_number("forcing", self.forcing, low=0.0, high=0.99, closed=False)

    def init(self, point: Evaluation, problem: Problem) -> NewtonState:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Newton's inner solves cannot be unrolled; use adjoint=Implicit() or another solver"
            )
        return NewtonState(
            base=point,
            direction=torch.zeros_like(point.z),
            length=torch.ones_like(point.norm),
            forcing=torch.full_like(point.norm, self.forcing),
        )

    def step(self, state: NewtonState, inputs: SolverInput) -> Tensor:
        trial = inputs.trial
        moved = torch.ones_like(trial.norm, dtype=torch.bool)
        if trial is not state.base:  # as it is at the first step
            if inputs.accepted is not None:
                moved = inputs.accepted
            if trial.energy is None:  # which the loop would judge by
                moved = moved & (trial.norm <= (1 - ARMIJO * state.length) * state.base.norm)
            shrinking = (trial.norm / state.base.norm).square() * 0.9
            forcing = torch.nan_to_num(shrinking, nan=self.forcing).clamp(1e-3, self.forcing)
            state.forcing = torch.where(moved, forcing, state.forcing)
            state.base = merge_rows(moved, trial, state.base)
        state.length = torch.where(moved, 1.0, 0.5 * state.length)
        if bool(moved.any()):
            direction = self._direction(state, moved, inputs)
            state.direction = where_rows(moved, direction, state.direction)
        gain = scaled_norm(state.direction) / scaled_norm(state.base.residual)
        inputs.gain = torch.nan_to_num(gain, nan=0.0)
        return state.base.z + state.length.to(trial.z.dtype)[:, None] * state.direction

    def _direction(self, state: NewtonState, rows: Tensor, inputs: SolverInput) -> Tensor:
        """Solve ``(I - J) s = r`` inexactly in ``rows``, within the remaining evaluations."""
        base, problem = state.base, inputs.problem
        # One evaluation to linearise, one at the trial point; what remains is for products.
        left = inputs.left - 2
        wanted = rows & (left > 0) & torch.isfinite(base.norm)
        step = base.residual.clone()
        index = torch.nonzero(wanted).flatten()
        if index.numel():
            part = problem
            if problem.compact:
                part = problem.rows(index, rows.numel())
            else:  # f closes over the whole batch: all rows go along
                index = torch.arange(rows.numel(), device=rows.device)
            point = select_rows(base, index)
            found, used = self._solve(part, point, state.forcing[index], left[index], wanted[index])
            # The residual replaces a direction that does not descend.
            uphill = (found * point.residual).sum(1) <= 0
            useless = uphill if base.energy is not None else found.eq(0).all(1)
            if not problem.unit_free:  # a step of a nearly singular matrix, far away from the start
                start = inputs.rows.limit[index] / DIVERGENCE
                useless = useless | (scaled_norm(point.z + found) > REACH * start)
            step[index] = where_rows(useless, point.residual, found)
            spent = (used + (used > 0)) * wanted[index]  # with the evaluation that linearises
            inputs.products = torch.zeros_like(left)
            if problem.compact:
                inputs.products = inputs.products.index_add(0, index, spent)
            else:
                inputs.products += spent.amax()
        return step

    def _solve(
        self, problem: Problem, point: Evaluation, forcing: Tensor, left: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return solutions (n, D) of ``(I - J) s = r`` in the ``wanted`` rows and their products.

        For few unknowns J is computed row by row. Otherwise the right-hand side is scaled to ``r / |r|``,
        because squares of r may overflow or underflow.
        """
        size_of = point.z.shape[1]
        if self.linear is None and size_of <= DENSE and point.energy is None:
            wanted = wanted & (left >= size_of)
            if not bool(wanted.any()):
                return torch.zeros_like(point.z), torch.zeros_like(left)
            matrix, right = problem.matrix(point.z), point.residual[:, :, None]
            found = torch.linalg.solve_ex(matrix, right)[0][:, :, 0]
            usable = wanted & torch.isfinite(found).all(1)
            return found.masked_fill(~usable[:, None], 0), torch.where(wanted, size_of, 0)
        product, dtype = problem.linearized(point.z), point.z.dtype
        chosen: Any = self.linear  # an instance, since __post_init__
        # CG ends at directions in which an energy is concave; a symmetric root need not have an energy.
        symmetric = MINRES() if point.energy is None else CG()
        solver: LinearSolver = chosen or (symmetric if problem.symmetric else GMRES(restart=30))
        working = torch.promote_types(dtype, torch.float32)
        size = torch.where(wanted & (point.norm > 0), point.norm, 1.0).to(working)[:, None]
        limit = forcing.to(working)[:, None]
        precondition = solver.on_vectors(problem.layout, problem.mask)
        run = solver.start(point.residual / size, limit, wanted[:, None], precondition)
        while bool(run.running.any()):
            along = torch.where(run.running, run.direction, 0)
            run.absorb(product(along))
            run.running = run.running & (run.used < left[:, None])
        return (run.result()[0] * size).to(dtype), run.used.flatten()


@dataclass
class NewtonState:
    """The current direction, its starting point and its cost."""

    base: Evaluation
    direction: Tensor  # (B, D) from base
    length: Tensor  # (B,) of the step along it
    forcing: Tensor  # (B,)

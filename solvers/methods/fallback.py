"""Fallback for samples on which the default solver failed.

A sample that stalled or diverged continues from its best iterate. Plain steps come first: they converge
if the map is a contraction, even with kinks or noise. Without an energy, Newton's method with
finite-difference products follows, which needs neither a contraction nor derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from solvers.core.loop import Loop, Options, Solver
from solvers.core.problem import JacobianProduct, Problem
from solvers.core.rows import Evaluation, scaled_norm
from solvers.core.solution import Solution, Status
from solvers.methods.newton import Newton
from solvers.methods.steps import Forward

PLAIN_PATIENCE = 10  # plain steps without a better residual after which Newton's method follows
FEW, EXACT = 30, 1e-6  # dimensions up to which Newton's linear solves have the tolerance EXACT
GIVEN_UP = (Status.STALLED, Status.DIVERGED, Status.NONFINITE)


@dataclass(frozen=True)
class DifferenceNewton(Newton):
    """Newton's method with ``J v = (f(z + h v) - f(z)) / h``, one evaluation per product.

    ``h |v| = sqrt(eps) (|z| + |f(z)|)`` makes the products independent of the scale of z.

    Source: Knoll and Keyes, "Jacobian-free Newton-Krylov methods", J. Comput. Phys. 193 (2004),
    https://doi.org/10.1016/j.jcp.2003.08.010.
    """

    recordings: ClassVar[int] = 0

    def _product(self, problem: Problem, point: Evaluation) -> JacobianProduct:
        size = scaled_norm(point.z) + point.reference
        length = torch.finfo(point.z.dtype).eps ** 0.5 * size

        def product(v: Tensor) -> Tensor:
            norm = scaled_norm(v)
            usable = (norm > 0) & (length > 0)
            step = torch.where(usable, length / torch.where(usable, norm, 1.0), 1.0)
            step = step.to(v.dtype).unsqueeze(1)
            if not problem.compact or bool(usable.all()):
                change = problem.evaluate(point.z + step * v).residual - point.residual
                return v + change / step
            # Nothing is evaluated for samples whose linear solve has ended.
            rows = torch.nonzero(usable).flatten()
            if rows.numel() == 0:
                return v
            part, step = problem.rows(rows, len(v)), step[rows]
            moved = part.evaluate(point.z[rows] + step * v[rows])
            return v.index_add(0, rows, (moved.residual - point.residual[rows]) / step)

        return product


def solve_failed(problem: Problem, solution: Solution, options: Options) -> Solution:
    """Solve the failed samples of ``solution`` again.

    All evaluations of a sample count towards ``max_steps``; with ``compact=False`` those of any sample.
    An unrolled solve has no fallback, because its steps are recorded.
    """
    if torch.is_grad_enabled():
        return solution
    stages: list[Solver] = [Forward()]
    if not problem.has_energy:
        # In few dimensions exact linear solves are cheap, and badly scaled systems need them.
        few = solution.value.shape[1] <= FEW
        stages.append(DifferenceNewton(forcing=EXACT if few else 0.1))
    for solver in stages:
        if solution.all_converged():
            break
        status, spent = solution.status, solution.evaluations
        failed = torch.isfinite(solution.residual) & torch.isin(status, status.new_tensor(GIVEN_UP))
        failed = failed & ((spent if problem.compact else spent.max()) + 2 <= options.max_steps)
        index = torch.nonzero(failed).flatten()
        if index.numel() == 0:
            break
        part = problem
        if problem.compact:
            part = problem.rows(index, len(failed))
        else:
            index = torch.arange(len(failed), device=failed.device)
        loop = Loop(part, part.evaluate(solution.value[index]), solver, options)
        loop.resume(solution, index, failed[index])
        if isinstance(solver, Forward):
            loop.patience = PLAIN_PATIENCE
        before, solution = solution, loop.run()
        status = solution.status
        # A residual that meets the tolerance at once is not why the sample has failed.
        solved = (status == Status.CONVERGED) & (solution.residual < before.residual)
        # An attempt that failed, too, tells more only if it has come closer and ran out of evaluations.
        nearer = (status == Status.MAX_STEPS) & (solution.residual < 0.5 * before.residual)
        kept = failed & ~(solved | nearer | (status == Status.STOPPED))
        solution.status = torch.where(kept, before.status, status)
    return solution

"""Second attempts for samples on which the default solver failed.

A sample that stalled or diverged is solved again from its best iterate, by each solver of a short list in
turn: Broyden's method, whose safeguard lets residuals rise for a while, Newton's method if the map is
differentiable, then plain steps, which converge wherever the map is a contraction. The default for energies
is followed by gradient steps with automatic step sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from solvers.core.loop import Loop, Options, Solver
from solvers.core.problem import Problem, RootUpdate
from solvers.core.rows import merge_rows, scatter_rows
from solvers.core.solution import Solution, Status, Trace
from solvers.methods.anderson import Anderson
from solvers.methods.broyden import Broyden
from solvers.methods.newton import Newton
from solvers.methods.steps import Forward, GradientDescent

MAPS: tuple[Solver, ...] = (Broyden(), Newton(), Forward())
ROOTS: tuple[Solver, ...] = (Anderson(), Broyden())
ENERGIES: tuple[Solver, ...] = (GradientDescent("auto"),)
GIVEN_UP = (Status.STALLED, Status.DIVERGED, Status.NONFINITE)


def solve_failed(problem: Problem, solution: Solution, options: Options) -> Solution:
    """Solve the failed samples of ``solution`` again.

    All evaluations of a sample count towards ``max_steps``; with ``compact=False`` those of any sample.
    An unrolled solve has no second attempt, because its steps are recorded.
    """
    if torch.is_grad_enabled():
        return solution
    roots = isinstance(problem.f, RootUpdate)
    solvers = ENERGIES if problem.has_energy else ROOTS if roots else MAPS
    for number, solver in enumerate(solvers, 1):
        status, spent = solution.status, solution.evaluations
        failed = torch.isfinite(solution.residual) & torch.isin(status, status.new_tensor(GIVEN_UP))
        spent = spent if problem.compact else spent.max().expand_as(spent)
        index = torch.nonzero(failed & (spent + 2 <= options.max_steps)).flatten()
        if index.numel() == 0:
            break
        part = problem.rows(index, len(failed)) if problem.compact else problem
        if not problem.compact:
            index = torch.arange(len(failed), device=failed.device)
        first = part.evaluate(solution.value[index])
        try:
            again = Loop(part, first, solver, options, spent[index]).run()
        except RuntimeError:
            if isinstance(solver, Newton):  # the map has no derivative, or no second one
                continue
            raise
        trace = _joined(solution, again, index, failed, number)
        solution = replace(_with(solution, again, index, failed, problem.unit_free), trace=trace)
    return solution


def _with(
    solution: Solution, again: Solution, index: Tensor, failed: Tensor, unit_free: bool
) -> Solution:
    """Return ``solution`` with the second attempts of its ``failed`` samples among the rows ``index``."""
    batch = len(failed)
    # An attempt that failed, too, counts only if it has come closer and ran out of evaluations,
    nearer = (again.status == Status.MAX_STEPS) & (again.residual < 0.5 * solution.residual[index])
    if unit_free and solution.energy is not None and again.energy is not None:  # or lower
        over = (again.status == Status.MAX_STEPS) | (again.status == Status.STALLED)
        lower = over & (again.energy < solution.energy[index])
        nearer = nearer | lower & (solution.status[index] == Status.STALLED)
    solved = (again.status == Status.CONVERGED) | (again.status == Status.STOPPED)
    taken = torch.zeros_like(failed).index_copy(0, index, failed[index] & (solved | nearer))
    names = ("value", "status", "residual", "residual_norm", "error", "energy", "_stiffness")
    new = {n: getattr(again, n) for n in names if getattr(solution, n) is not None}
    whole = {n: scatter_rows(t, index, batch, 0) for n, t in new.items()}
    merged = merge_rows(taken, replace(solution, **whole), solution)
    spent = torch.zeros_like(failed).index_copy(0, index, failed[index])
    evaluations = scatter_rows(again.evaluations, index, batch, 0)
    steps = scatter_rows(again.steps, index, batch, 0)
    merged.evaluations = torch.where(spent, evaluations, solution.evaluations)
    merged.steps = solution.steps + torch.where(spent, steps, 0)
    return merged


def _joined(
    solution: Solution, again: Solution, index: Tensor, failed: Tensor, number: int
) -> Trace | None:
    """Return the traces up to the attempt of this ``number``, one after the other in each ``failed`` row."""
    first, second = solution.trace, again.trace
    if first is None or second is None:
        return first
    spent = solution.evaluations[index]
    width = int((spent + second.residual.shape[1]).max())

    def join(before: Tensor | None, after: Tensor | None, fill: float) -> Any:
        if before is None or after is None:
            return None
        wide = before.new_full((len(before), max(width, before.shape[1])), fill)
        wide[:, : before.shape[1]] = before
        for row, start, values in zip(index.tolist(), spent.tolist(), after, strict=True):
            if failed[row]:
                wide[row, start : start + len(values)] = values
        return wide

    attempts, own = first.attempt, torch.full_like(second.residual, number, dtype=torch.int64)
    if attempts is None:
        attempts = torch.zeros_like(first.residual, dtype=torch.int64)
    return Trace(
        join(first.residual, second.residual, torch.nan),
        join(first.energy, second.energy, torch.nan),
        join(first.accepted, second.accepted, False),
        join(attempts, own, -1),
    )

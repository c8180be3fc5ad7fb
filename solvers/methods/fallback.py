"""Fallback for samples on which the default solver failed.

A sample that stalled or diverged continues from its best iterate. Plain steps come first: they converge
if the map is a contraction, even with kinks or noise. Without an energy, Newton's method with
finite-difference products follows, which needs neither a contraction nor derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from solvers.core.loop import Loop, Rule, Solver
from solvers.core.problem import JacobianProduct, Problem
from solvers.core.rows import Best, Point, Progress, row_norm, scaled_norm, where_rows
from solvers.core.safeguard import rounding
from solvers.core.solution import Solution, Status, Tolerance, Trace
from solvers.methods.newton import Newton
from solvers.methods.steps import Forward

PLAIN_PATIENCE = 10  # plain steps without a better residual after which Newton's method follows
FEW, EXACT = 30, 1e-6  # dimensions up to which Newton's linear solves have the tolerance EXACT
NOISE = 16  # energy differences below this multiple of the rounding error are insignificant
GIVEN_UP = (Status.STALLED, Status.DIVERGED, Status.NONFINITE)


@dataclass(frozen=True)
class DifferenceNewton(Newton):
    """Newton's method with ``J v = (f(z + h v) - f(z)) / h``, one evaluation per product.

    ``h |v| = sqrt(eps) (|z| + |f(z)|)`` makes the products independent of the scale of z.

    Source: Knoll and Keyes, "Jacobian-free Newton-Krylov methods", J. Comput. Phys. 193 (2004),
    https://doi.org/10.1016/j.jcp.2003.08.010.
    """

    recordings: ClassVar[int] = 0

    def _product(self, problem: Problem, point: Point) -> JacobianProduct:
        size = scaled_norm(point.z) + point.reference
        length = torch.finfo(point.z.dtype).eps ** 0.5 * size

        def product(v: Tensor) -> Tensor:
            norm = row_norm(v)
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


def solve_failed(
    problem: Problem,
    solution: Solution,
    tolerance: Tolerance,
    max_steps: int,
    record: bool = False,
    callback: Callable[[Progress], object] | None = None,
    states_at: Sequence[int] = (),
    rule: Rule | None = None,
) -> None:
    """Solve the failed samples of ``solution`` again, in place.

    All evaluations of a sample count towards ``max_steps``; with ``compact=False`` those of any sample.
    An unrolled solve has no fallback, because its steps are recorded.
    """
    if torch.is_grad_enabled() or solution.all_converged():
        return
    batch = solution.status.numel()
    stages: list[Solver] = [Forward()]
    if not problem.has_energy:
        # In few dimensions exact linear solves are cheap, and badly scaled systems need them.
        few = solution.value.shape[1] <= FEW
        stages.append(DifferenceNewton(forcing=EXACT if few else 0.1))
    for solver in stages:
        spent = solution.evaluations
        if not problem.compact:  # each has been in all of them
            spent = spent.max().expand_as(spent)
        rows = _given_up(solution, spent, max_steps)
        if rows.numel() == 0:
            break
        index = rows if problem.compact else torch.arange(batch, device=rows.device)
        part = problem.rows(index, batch) if problem.compact else problem
        spent = spent[index]
        start = part.exact(part.evaluate(solution.value[index]))
        report = None if callback is None else _counting_on(callback, int(spent.max()), max_steps)
        loop = Loop(part, start, solver, tolerance, max_steps, record, report, states_at, rule)
        loop.snapshots.uneven = True  # rows go on counting their evaluations
        loop.guarded = False
        # Rows report their indices in the whole batch.
        loop.rows.index, loop.history.batch = index, batch
        if isinstance(solver, Newton):
            state = solver.init(start, part)
            state.products += spent
            loop.start_from(state)
        else:
            loop.patience = PLAIN_PATIENCE
            loop.rows.products = spent
        if not problem.compact:
            others = torch.ones(batch, dtype=torch.bool, device=rows.device)
            others = others.index_fill(0, rows, False)
            loop.rows.status = torch.where(others, solution.status, loop.rows.status)
        found = loop.run()
        order = torch.arange(len(index), device=rows.device) if problem.compact else rows
        _merge(solution, found, rows, order, spent[order])


def _given_up(solution: Solution, spent: Tensor, max_steps: int) -> Tensor:
    """Return the indices of failed samples with a finite iterate and two evaluations left."""
    status = solution.status
    failed = torch.isfinite(solution.residual) & (spent + 2 <= max_steps)
    given_up = torch.zeros_like(failed)
    for kind in GIVEN_UP:
        given_up |= status == int(kind)
    return torch.nonzero(failed & given_up).flatten()


def _counting_on(
    callback: Callable[[Progress], object], before: int, most: int
) -> Callable[[Progress], object]:
    """Return ``callback`` with ``before`` added to the evaluations, at most ``most``."""
    return lambda progress: callback(
        replace(progress, evaluation=min(before + progress.evaluation, most))
    )


def _merge(solution: Solution, found: Solution, rows: Tensor, order: Tensor, spent: Tensor) -> None:
    """Merge the rows ``order`` of the solution ``found`` into the samples ``rows``.

    These had ``spent`` evaluations before. A better iterate replaces the old one unless its energy
    is higher. The status remains that of the first attempt, unless this one converged, or came
    closer and ran out of evaluations.
    """
    relative, status = found.residual[order], found.status[order]
    whole = Best(found.value, found.residual, found.residual_norm, found.energy)
    better = _better(whole, solution, rows, order)
    # Before the values: a state of the attempt is a better one than where the attempt began.
    for state, tried in zip(solution.states or (), found.states or (), strict=True):
        taken = _better(tried, solution, rows, order)
        value = where_rows(taken, tried.value[order], state.value[rows])
        state.value = state.value.index_copy(0, rows, value)
    nearer = relative < 0.5 * solution.residual[rows]
    ended = better & (
        (status == int(Status.CONVERGED)) | (nearer & (status == int(Status.MAX_STEPS)))
    )

    def write(old: Tensor, new: Tensor, mask: Tensor) -> Tensor:
        return old.index_copy(0, rows, where_rows(mask, new[order], old[rows]))

    always = torch.ones_like(better)
    solution.status = write(solution.status, found.status, ended)
    solution.value = write(solution.value, found.value, better)
    solution.residual = write(solution.residual, found.residual, better)
    solution.residual_norm = write(solution.residual_norm, found.residual_norm, better)
    if found.energy is not None and solution.energy is not None:
        solution.energy = write(solution.energy, found.energy, better)
    solution.evaluations = write(solution.evaluations, found.evaluations, always)
    solution.steps = solution.steps.index_add(0, rows, found.steps[order])
    if solution.trace is not None and found.trace is not None:
        solution.trace = _joined(
            solution.trace, found.trace, rows, spent, int(solution.evaluations.max())
        )


def _better(found: Best, solution: Solution, rows: Tensor, order: Tensor) -> Tensor:
    """Return where ``found`` improves the samples ``rows`` without a higher energy, (n,) bool."""
    better = found.relative[order] < solution.residual[rows]
    if found.energy is not None and solution.energy is not None:
        energy, before = found.energy[order], solution.energy[rows]
        better = better & (energy <= before + NOISE * rounding(before))
    return better


def _joined(first: Trace, second: Trace, rows: Tensor, spent: Tensor, width: int) -> Trace:
    """Concatenate two traces for each sample, up to ``width`` columns."""
    columns = max(first.residual.shape[1], int(spent.max()) + second.residual.shape[1])

    def join(one: Tensor, other: Tensor, fill: float) -> Tensor:
        whole = one.new_full((len(one), columns), fill)
        whole[:, : one.shape[1]] = one
        where = spent[:, None] + torch.arange(other.shape[1], device=one.device)
        whole[rows[:, None], where] = other[rows]
        return whole[:, :width]

    energy, accepted = first.energy, first.accepted
    if energy is not None and second.energy is not None:
        energy = join(energy, second.energy, torch.nan)
    if accepted is not None and second.accepted is not None:
        accepted = join(accepted, second.accepted, False)
    return Trace(join(first.residual, second.residual, torch.nan), energy, accepted)

"""Books that balance: residuals, evaluations, caps, traces, callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.solves import (
    FEW,
    SOLVERS,
    Counter,
    EnergyCounter,
    Given,
    Plain,
    solve,
    true_residuals,
)
from problems.zoo import make
from solvers import Forward, Newton, Progress, Solution, Status, Tolerance, fixed_point
from solvers.core.problem import Problem
from solvers.core.rows import Point

MIXTURE = [
    "kepler", "linear_one_hard_sample", "tanh_gain_1.75", "mgh_chebyquad", "energy_rosenbrock_10",
    "exponential", "nan_from_start", "transient_nan", "start_at_solution",
]  # fmt: skip


def counted(name: str, solver: str, max_steps: int, **options: Any) -> tuple[Solution, Tensor]:
    """A solve without and a count of the times that each sample was seen by f."""
    problem = make(name)
    counter: Counter | EnergyCounter
    if SOLVERS[solver].needs_energy:
        counter = EnergyCounter(Given(problem), problem.batch)
    else:
        counter = Counter(Plain(problem), problem.batch)
    solution = fixed_point(
        counter,
        problem.z0,
        (*problem.args, counter.index),
        solver=SOLVERS[solver],
        tolerance=Tolerance(rtol=1e-6),
        max_steps=max_steps,
        adjoint=None,
        on_failure="ignore",
        **options,
    )
    return solution, counter.seen


@pytest.mark.parametrize("name", MIXTURE)
@pytest.mark.parametrize("solver", [name for name in SOLVERS if name != "newton"])
def test_evaluations_are_the_times_that_f_saw_the_sample(solver: str, name: str) -> None:
    if SOLVERS[solver].needs_energy and make(name).energy is None:
        pytest.skip("a minimiser needs an energy")
    solution, seen = counted(name, solver, 60)
    assert solution.evaluations.tolist() == seen.tolist()
    assert (solution.evaluations <= 60).all()


@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("max_steps", [1, 2, 3, 4, 5, 8, 13])
def test_the_cap_is_kept(solver: str, max_steps: int) -> None:
    solution, seen = counted("energy_quadratic_100", solver, max_steps)
    assert (solution.status == Status.MAX_STEPS).all()
    assert (solution.evaluations <= max_steps).all()
    assert (seen <= max_steps).all()
    assert (solution.evaluations == max_steps).all() or solver == "newton"


class Passes(torch.autograd.Function):
    """Identity that counts backward passes per row; ``note(rows)`` is told the sample numbers."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return grad_outputs[0].clone(), None


@pytest.mark.parametrize("max_steps", [1, 2, 3, 5, 9, 20, 60])
def test_newton_counts_its_products_and_keeps_the_cap(max_steps: int) -> None:
    """One sample alone: evaluations of f and pullbacks, each counted inside f."""
    problem = make("linear_symmetric_0.9")
    matrix, offset = problem.args[0][:1], problem.args[1][:1]
    calls, products = 0, 0

    def note() -> None:
        nonlocal products
        products += 1

    class Affine:
        symmetric = True

        def __call__(self, z: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return Passes.apply(torch.einsum("bmd,bd->bm", matrix, z) + offset, note)

    solution = fixed_point(
        Affine(), problem.z0[:1], (matrix, offset), solver=Newton(), max_steps=max_steps,
        adjoint=None, on_failure="ignore", tolerance=Tolerance(rtol=1e-8),
    )  # fmt: skip
    assert int(solution.evaluations) <= max_steps
    # f is called once more per direction to record its graph, never beyond the budget
    assert calls <= max_steps
    assert int(solution.evaluations) >= products + int(solution.steps)
    assert products <= max_steps


@pytest.mark.parametrize("name", MIXTURE)
@pytest.mark.parametrize("solver", FEW)
def test_residual_and_value_belong_together(solver: str, name: str) -> None:
    problem = make(name)
    solution = solve(problem, solver, max_steps=40)
    seen = solution.residual.isfinite()
    relative, absolute = true_residuals(problem, solution.value)
    torch.testing.assert_close(solution.residual[seen], relative[seen], rtol=1e-6, atol=1e-15)
    scale = float(absolute[seen].max()) if bool(seen.any()) else 0.0
    torch.testing.assert_close(
        solution.residual_norm[seen], absolute[seen], rtol=1e-6, atol=1e-15 * max(scale, 1.0)
    )
    assert (solution.status[~seen] == Status.NONFINITE).all()


@pytest.mark.parametrize("name", MIXTURE)
@pytest.mark.parametrize("solver", FEW)
def test_the_trace_is_the_history(solver: str, name: str) -> None:
    problem = make(name)
    watched: list[Progress] = []
    solution = solve(problem, solver, max_steps=40, record=True, callback=watched.append)
    trace = solution.trace
    assert trace is not None
    assert trace.accepted is not None
    columns = trace.residual.shape[1]
    assert [each.evaluation for each in watched] == list(range(1, columns + 1))
    for column, progress in enumerate(watched):
        torch.testing.assert_close(progress.residual, trace.residual[:, column], equal_nan=True)
        assert progress.running >= int((~trace.residual[:, column].isnan()).sum())
    for sample in range(problem.batch):
        own = trace.residual[sample]
        accepted = trace.accepted[sample]
        length = int(solution.evaluations[sample])
        if solver == "newton":  # whose evaluations include products, which have no column
            length = min(length, int((~own.isnan()).nonzero().max()) + 1 if accepted.any() else 1)
        assert own[length:].isnan().all()
        assert not accepted[length:].any()
        taken = own[accepted]
        best = float(taken[taken.isfinite()].min()) if bool(taken.isfinite().any()) else math.inf
        assert float(solution.residual[sample]) == pytest.approx(best, rel=1e-12)
    assert (solution.steps == trace.accepted.sum(1)).all()


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_steps_are_evaluations_without_products_and_rejections(solver: str, compact: bool) -> None:
    problem = make("energy_log_sum_exp")
    solution = solve(problem, solver, compact=compact, record=True, max_steps=100)
    trace = solution.trace
    assert trace is not None
    assert trace.accepted is not None
    assert solution.steps.tolist() == trace.accepted.sum(1).tolist()
    assert (solution.steps <= solution.evaluations).all()


@pytest.mark.parametrize("name", ["runaway", "linear_expanding", "tanh_gain_1.75", "cos"])
@pytest.mark.parametrize("solver", FEW)
def test_watching_changes_nothing(solver: str, name: str) -> None:
    problem = make(name)
    quiet = solve(problem, solver, max_steps=120)
    recorded = solve(problem, solver, max_steps=120, record=True)
    watched = solve(problem, solver, max_steps=120, callback=lambda progress: None)
    for other in (recorded, watched):
        assert other.status.tolist() == quiet.status.tolist()
        assert other.evaluations.tolist() == quiet.evaluations.tolist()
        torch.testing.assert_close(other.value, quiet.value, rtol=1e-12, atol=1e-12)


def test_a_solver_is_asked_for_its_state_once() -> None:
    """Also one that has nothing to remember and answers None."""
    calls = []

    class Watched(Forward):
        def init(self, point: Point, problem: Problem) -> None:
            calls.append(point)

    solution = solve(make("cos"), Watched())
    assert int(solution.evaluations.max()) > 5
    assert len(calls) == 1

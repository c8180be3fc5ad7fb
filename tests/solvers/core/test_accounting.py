"""Books that balance: residuals, evaluations, caps, traces, callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.solves import FEW, SOLVERS, Counter, EnergyCounter, Given, Plain, solve, true_residuals
from problems.zoo import make
from solvers import Newton, Progress, Solution, Status, fixed_point

MIXTURE = [
    "linear_one_hard_sample", "tanh_gain_1.75", "energy_rosenbrock_10", "nan_from_start",
    "transient_nan", "start_at_solution",
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
        counter, problem.z0, (*problem.args, counter.index), solver=SOLVERS[solver], tolerance=1e-6,
        max_steps=max_steps, adjoint=None, on_failure="ignore", **options,
    )  # fmt: skip
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
@pytest.mark.parametrize("max_steps", [1, 2, 5, 13])
def test_the_cap_is_kept(solver: str, max_steps: int) -> None:
    solution, seen = counted("energy_quadratic_100", solver, max_steps)
    assert (solution.status == Status.MAX_STEPS).all()
    assert (solution.evaluations <= max_steps).all()
    assert (seen <= max_steps).all()
    assert (solution.evaluations == max_steps).all() or solver == "newton"


def steep(z: Tensor, rate: Tensor, *_: Tensor) -> Tensor:
    """``z - F(z)``, F(z) = rate z + z^3 - 1: large rates lead most methods astray, some samples at once."""
    return z - (rate * z.roll(1, 1) + z**3 - 1)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("max_steps", [13, 400])
@pytest.mark.parametrize("solver", [None, *FEW])
def test_no_sample_is_in_more_calls_than_allowed(
    solver: str | None, max_steps: int, compact: bool
) -> None:
    """In a batch that ends in pieces, second attempts included; what is uncompacted is all in each call."""
    rate = torch.logspace(-0.5, 2.5, 40, dtype=torch.float64)[:, None].repeat(1, 6)
    rate[1::2] *= -1
    start = torch.linspace(-3, 3, 6, dtype=torch.float64).expand(40, 6) + 0.1
    counter = Counter(steep, 40)
    solution = fixed_point(
        counter, start, (rate, counter.index), solver=None if solver is None else SOLVERS[solver],
        tolerance=1e-9, max_steps=max_steps, adjoint=None, on_failure="ignore",
        compact=compact, callback=lambda progress: None,
    )  # fmt: skip
    assert not solution.converged.all()
    assert (counter.seen <= max_steps).all() and (solution.evaluations <= max_steps).all()
    if not compact:
        assert len(counter.sizes) <= max_steps


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


@pytest.mark.parametrize("max_steps", [1, 3, 20, 60])
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
        adjoint=None, on_failure="ignore", tolerance=1e-8,
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
    assert trace is not None and trace.accepted is not None
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


@pytest.mark.parametrize("name", ["runaway", "linear_expanding"])
@pytest.mark.parametrize("solver", FEW)
def test_watching_changes_nothing(solver: str, name: str) -> None:
    problem = make(name)
    quiet = solve(problem, solver, max_steps=120)
    recorded = solve(problem, solver, max_steps=120, record=True)
    watched = solve(problem, solver, max_steps=120, callback=lambda progress: None)
    for other in (recorded, watched):
        assert other.status.tolist() == quiet.status.tolist()
        assert other.evaluations.tolist() == quiet.evaluations.tolist()
        # The engine and the loop round differently, which a runaway amplifies without bound.
        found, wanted = (each.value[quiet.converged] for each in (other, quiet))
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)

"""Statuses: honest on hopeless problems, in time, and one sample at a time."""

from __future__ import annotations

import math

import pytest
import torch

from cases.solves import PLAIN, SOLVERS, plain_batch, solve, true_residuals
from problems.zoo import PATHOLOGICAL, make
from solvers import Forward, Solution, SolveError, SolveWarning, Status, fixed_point

FAILURES = {Status.MAX_STEPS, Status.STALLED, Status.DIVERGED, Status.NONFINITE}


@pytest.mark.parametrize("solver", PLAIN)
def test_a_map_without_fixed_point_is_never_called_solved(solver: str) -> None:
    solution = solve(make("runaway"), solver, max_steps=200)
    assert set(solution.status.tolist()) <= FAILURES
    assert (solution.residual >= 1 / 3 - 1e-9).all()


@pytest.mark.parametrize("solver", ["forward", "gradient"])
def test_plain_iterates_that_run_away_are_called_diverged_in_time(solver: str) -> None:
    solution = solve(make("runaway"), solver, max_steps=200)
    assert (solution.status == Status.DIVERGED).all()
    # they grow by 3/2 a step, and 1e6 = 1.5 ** 34
    assert (solution.evaluations <= 45).all()


@pytest.mark.parametrize("name", ["exponential", "logarithm"])
@pytest.mark.parametrize("solver", PLAIN)
def test_maps_that_leave_their_domain_end_honestly(solver: str, name: str) -> None:
    problem = make(name)
    solution = solve(problem, solver, max_steps=150)
    assert set(solution.status.tolist()) <= FAILURES
    assert solution.value.isfinite().all()
    relative, _ = true_residuals(problem, solution.value)
    torch.testing.assert_close(solution.residual, relative, rtol=1e-9, atol=0)


@pytest.mark.parametrize("safeguarded", [False, True])
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_a_start_where_f_is_nan_spoils_only_its_own_sample(solver: str, safeguarded: bool) -> None:
    problem = make("nan_from_start")
    solution = solve(problem, solver, safeguarded=safeguarded)
    assert solution.status.tolist() == [0, 0, Status.NONFINITE, 0, 0]
    assert solution.evaluations[2] == 1
    assert solution.residual[2] == math.inf
    assert torch.equal(solution.value[2], problem.z0[2])
    good = torch.tensor([0, 1, 3, 4])
    torch.testing.assert_close(
        solution.value[good], torch.ones(4, 4, dtype=torch.float64), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("solver", ["anderson", "broyden", "gradient_auto", "newton"])
def test_a_transient_nan_is_stepped_back_from(solver: str) -> None:
    problem = make("transient_nan")
    solution = solve(problem, solver, record=True)
    assert solution.converged.tolist() == [True] * 5
    trace = solution.trace
    assert trace is not None and trace.accepted is not None
    assert not trace.accepted[0].all()  # the first sample did meet NaN
    assert solution.value.isfinite().all()


@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("name", [*PATHOLOGICAL, "linear_singular"])
def test_a_sample_called_converged_is_within_the_tolerance(solver: str, name: str) -> None:
    problem = make(name)
    if SOLVERS[solver].needs_energy and problem.energy is None:
        pytest.skip("a minimiser needs an energy")
    solution = solve(problem, solver, max_steps=100)
    relative, _ = true_residuals(problem, solution.value)
    converged = solution.converged
    assert (relative[converged] <= 1e-6 * (1 + 1e-6)).all()
    assert not (relative[~converged] <= 1e-6 * (1 - 1e-6)).any()


def test_a_tolerance_below_rounding_is_called_stalled() -> None:
    solution = solve(make("linear_symmetric_0.5"), "forward", rtol=0.0, max_steps=2000)
    assert set(solution.status.tolist()) <= {Status.STALLED, Status.CONVERGED}
    assert (solution.evaluations < 1000).all()
    assert (solution.residual < 1e-15).all()


@pytest.mark.parametrize("solver", ["anderson", "anderson_damped", "broyden"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wild_step_is_no_divergence(solver: str, dtype: torch.dtype) -> None:
    """``tanh(k z / 2 + x)`` with k 0 or 2 is bounded and contracts: nothing can run away.

    Where |x| is small it contracts so little that rounding decides after how many evaluations it ends.
    """
    converged = 0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(16, 32, generator=generator).to(dtype)
        keep = 2 * torch.randint(0, 2, (16, 32), generator=generator).to(dtype)
        solution = fixed_point(
            lambda z, x, keep: torch.tanh(0.5 * keep * z + x), torch.zeros_like(x), (x, keep),
            solver=SOLVERS[solver], adjoint=None, max_steps=300, on_failure="ignore",
        )  # fmt: skip
        assert set(solution.counts()) <= {"CONVERGED", "STALLED", "MAX_STEPS"}
        converged += int(solution.converged.sum())
    assert converged >= 0.95 * 8 * 16


def test_a_cycle_is_called_stalled() -> None:
    z0 = torch.tensor([[0.1], [0.7]], dtype=torch.float64)
    solution = fixed_point(
        lambda z: 1 - z, z0, solver=Forward(), max_steps=1000, adjoint=None, on_failure="ignore"
    )
    assert (solution.status == Status.STALLED).all()


def test_a_sample_whose_energy_keeps_falling_has_not_stalled() -> None:
    problem = make("energy_double_wells")
    assert problem.converges_plain
    solution = solve(problem, "forward", max_steps=4000, safeguarded=True)
    assert solution.counts() == {"CONVERGED": problem.batch}


def test_the_policies() -> None:
    f, z0, args = plain_batch(3)
    with pytest.warns(SolveWarning, match=r"fixed-point solve .*MAX_STEPS 3 of 3.*max_steps"):
        fixed_point(f, z0, args, max_steps=2)
    with pytest.raises(SolveError, match="MAX_STEPS 3 of 3") as caught:
        fixed_point(f, z0, args, max_steps=2, on_failure="raise")
    assert isinstance(caught.value.solution, Solution)
    assert caught.value.solution.value.shape == z0.shape
    assert fixed_point(f, z0, args, max_steps=2, on_failure="ignore").counts() == {"MAX_STEPS": 3}


def test_the_summary_and_the_counts() -> None:
    solution = solve(make("nan_from_start"), "anderson")
    assert solution.counts() == {"CONVERGED": 4, "NONFINITE": 1}
    assert solution.summary().startswith("CONVERGED 4, NONFINITE 1 of 5; worst relative residual")
    assert solution.converged.tolist() == [True, True, False, True, True]


def test_a_point_whose_image_is_zero_has_a_finite_residual() -> None:
    # 4 over the smallest number is infinite in float32.
    solution = fixed_point(
        lambda z: 0 * z, torch.full((1, 1), 4.0), max_steps=1, on_failure="ignore"
    )
    assert solution.status.tolist() == [Status.MAX_STEPS]
    assert solution.residual_norm.tolist() == [4.0]
    assert solution.residual.isfinite().all()


def test_a_start_where_f_is_nan_is_told_with_a_single_step_too() -> None:
    start = torch.tensor([[-1.0], [1.0]])
    solution = fixed_point(torch.log, start, max_steps=1, on_failure="ignore")
    assert solution.status.tolist() == [Status.NONFINITE, Status.MAX_STEPS]

"""A batch of linear systems: independence, samples that leave, the step cap, odd samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases.linear import Counting, matrices, mixed, multiply, right_sides, true_residual
from solvers.core import device
from solvers.core.solution import Solution, Status
from solvers.core.tolerance import Tolerance
from solvers.krylov import loop
from solvers.krylov.method import LinearSolver
from solvers.krylov.solve import CG, GMRES, MINRES, solve_linear

SOLVERS = [CG(), MINRES(), GMRES(restart=6), GMRES(restart=30)]
ALL = pytest.mark.parametrize("solver", SOLVERS, ids=str)


def solve(solver: LinearSolver, matrix: Tensor, right: Tensor, **options: object) -> Solution:
    settings: dict = {"tolerance": 1e-6, "on_failure": "ignore", "max_steps": 400}
    settings.update(options)
    return solve_linear(multiply, right, solver=solver, args=(matrix,), **settings)


def rows(solution: Solution, index: Tensor | slice) -> tuple[Tensor, ...]:
    fields = (solution.value, solution.residual, solution.status, solution.evaluations)
    return tuple(field[index] for field in fields)


def assert_same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> None:
    """Values to rounding, which the systems amplify; statuses and counts exactly."""
    torch.testing.assert_close(first[0], second[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first[1], second[1], rtol=1e-3, atol=1e-7)
    assert torch.equal(first[2], second[2])
    assert torch.equal(first[3], second[3])


@ALL
@pytest.mark.parametrize("compact", [True, False])
def test_a_sample_does_not_notice_its_neighbours(solver: LinearSolver, compact: bool) -> None:
    matrix, right = mixed(20)
    if compact:
        together = solve(solver, matrix, right)
    else:
        together = solve_linear(
            lambda v: multiply(v, matrix), right, solver=solver, tolerance=1e-6, max_steps=400,
            compact=False,
        )  # fmt: skip
    assert together.converged.all()
    assert together.evaluations.unique().numel() > 2
    for sample in range(0, 20, 3):
        alone = solve(solver, matrix[sample : sample + 1], right[sample : sample + 1])
        assert_same(rows(together, slice(sample, sample + 1)), rows(alone, slice(None)))


@ALL
@settings(max_examples=12, deadline=None)
@given(
    of_b=st.floats(-30, 30),
    of_a=st.floats(-6, 6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_scale_changes_no_count(
    solver: LinearSolver, of_b: float, of_a: float, dtype: torch.dtype
) -> None:
    matrix, right = (t.to(dtype) for t in mixed(6, hardest=6.0))
    tolerance = Tolerance(rtol=1e-4)
    plain = solve(solver, matrix, right, tolerance=tolerance)
    scaled = solve(solver, matrix * 10**of_a, right * 10**of_b, tolerance=tolerance)
    assert torch.equal(plain.status, scaled.status)
    # A product or two more or less where a residual lies on the threshold to rounding.
    assert (plain.evaluations - scaled.evaluations).abs().max() <= 1
    expected = plain.value.double() * 10 ** (of_b - of_a)
    difference = (scaled.value.double() - expected).norm(dim=1)
    assert (difference <= 2e-2 * expected.norm(dim=1)).all()


@ALL
def test_finished_samples_leave_the_batch(solver: LinearSolver) -> None:
    """31 easy samples and a hard one: the easy ones are not billed for the hard one."""
    easy = matrices("definite", 31, 24, condition=2.0)
    hard = matrices("definite", 1, 24, condition=3e3)
    matrix, right = torch.cat([easy[:7], hard, easy[7:]]), right_sides(32, 24)
    count = Counting(32)
    solution = solve_linear(
        count, right, solver=solver, args=(matrix, torch.arange(32)), max_steps=5000, tolerance=1e-6
    )
    assert solution.converged.all()
    assert solution.evaluations[7] > 2 * solution.evaluations[:7].max()
    assert count.rows[0] == 32
    assert min(count.rows) == 1
    assert sum(count.rows) <= 1.06 * solution.evaluations.sum().item() + 32
    assert (true_residual(matrix, right, solution) <= 1.01e-6).all()


def test_a_closed_over_batch_is_kept_whole() -> None:
    matrix, right = mixed(20)
    seen = []

    def product(vectors: Tensor) -> Tensor:
        seen.append(vectors.shape[0])
        return multiply(vectors, matrix)

    solution = solve_linear(product, right, solver=GMRES(restart=4), max_steps=400, compact=False)
    assert solution.converged.all()
    assert set(seen) == {20}
    with pytest.raises(RuntimeError, match="compact=False"):
        solve_linear(product, right, solver=CG(), max_steps=400)


@ALL
@pytest.mark.parametrize("max_steps", [1, 3, 13])
@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_step_cap_is_kept(
    solver: LinearSolver, max_steps: int, start: bool, dtype: torch.dtype
) -> None:
    matrix, right = (t.to(dtype) for t in mixed(10))
    count = Counting(10)
    solution = solve_linear(
        count, right, solver=solver, args=(matrix, torch.arange(10)), max_steps=max_steps,
        x0=torch.ones_like(right) if start else None, on_failure="ignore",
    )  # fmt: skip
    assert (solution.evaluations <= max_steps).all()
    assert (solution.evaluations <= count.products).all()
    assert (count.products <= max_steps).all()
    assert (solution.steps <= solution.evaluations).all()
    true = true_residual(matrix, right, solution)
    rounding = 1e-9 if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(solution.residual.double(), true, rtol=1e-3, atol=rounding)
    assert (true[solution.converged] <= 1.1e-6).all()
    unfinished = solution.status == Status.MAX_STEPS
    assert (unfinished | solution.converged).all()
    assert (solution.evaluations[unfinished] == max_steps).all()


@ALL
def test_a_zero_right_side_is_solved_by_zero(solver: LinearSolver) -> None:
    matrix, right = mixed(4)
    right[2] = 0
    for x0 in (None, torch.ones_like(right)):
        solution = solve(solver, matrix, right, x0=x0)
        assert solution.converged.all()
        assert (solution.value[2] == 0).all()
        assert solution.residual[2] == 0
        assert solution.steps[2] == 0
        assert solution.evaluations[2] == 0


@ALL
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("compact", [True, False])
def test_right_sides_that_are_not_finite(solver: LinearSolver, bad: float, compact: bool) -> None:
    matrix, right = mixed(4)
    right[1, 3] = bad
    solution = solve(solver, matrix, right, compact=compact)
    assert solution.status.tolist() == [0, Status.NONFINITE, 0, 0]
    assert solution.value.isfinite().all()
    assert solution.residual[1] == float("inf")
    assert solution.evaluations[1] == 0
    clean = solve(solver, matrix[2:], right[2:])
    assert_same(rows(solution, slice(2, 4)), rows(clean, slice(None)))


@ALL
@pytest.mark.parametrize(("bad", "at"), [(float("nan"), 1), (float("inf"), 4)])
@pytest.mark.parametrize("compact", [True, False])
def test_products_that_are_not_finite(
    solver: LinearSolver, bad: float, at: int, compact: bool
) -> None:
    matrix, right = mixed(20)
    calls = torch.zeros(20, dtype=torch.int64)

    def product(vectors: Tensor, matrix: Tensor, sample: Tensor) -> Tensor:
        calls[sample] += 1
        image = multiply(vectors, matrix)
        image[(sample == 4) & (calls[sample] >= at), 5] = bad
        return image

    args = (matrix, torch.arange(20))
    solution = solve_linear(
        product, right, solver=solver, args=args, max_steps=400, tolerance=1e-6, compact=compact,
        on_failure="ignore",
    )  # fmt: skip
    assert solution.status[4] == Status.NONFINITE
    assert solution.value.isfinite().all()
    assert solution.residual.isfinite().all()
    true = true_residual(matrix, right, solution)
    torch.testing.assert_close(solution.residual, true, rtol=1e-6, atol=1e-10)
    assert solution.residual[4] <= 1 + 1e-12
    others = torch.arange(20) != 4
    assert solution.converged[others].all()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code paths of an accelerator on the CPU: nothing is read at once, masks arrive late."""
    for module in (device, loop):
        monkeypatch.setattr(module, "readable", lambda device: False)
    monkeypatch.setattr(device, "lag_of", lambda device: 2)


@ALL
@pytest.mark.parametrize("compact", [True, False])
def test_the_paths_of_an_accelerator_agree(
    solver: LinearSolver, compact: bool, accelerator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, right = mixed(20)
    right[3], right[5, 0] = 0, float("nan")
    matrix[7] = -matrix[7]
    other = solve(solver, matrix, right, compact=compact)
    monkeypatch.undo()
    plain = solve(solver, matrix, right, compact=compact)
    assert_same(rows(other, slice(None)), rows(plain, slice(None)))

"""CG, MINRES and GMRES against dense solutions and scipy; in batches; where they must fail."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import scipy.sparse.linalg
import torch
from torch import Tensor

from cases.solves import Counter, exact, matrices, mixed, multiply, right_sides, true_residual
from solvers import (
    CG,
    GMRES,
    MINRES,
    LinearSolver,
    Progress,
    Solution,
    SolveWarning,
    Status,
    Tolerance,
    solve_linear,
)


def solve(solver: LinearSolver, matrix: Tensor, right: Tensor, **options: object) -> Solution:
    settings: dict = {"tolerance": 1e-6, "on_failure": "ignore", "max_steps": 400}
    settings.update(options)
    return solve_linear(multiply, right, solver=solver, args=(matrix,), **settings)


SUITED = [
    ("definite", CG()),
    ("definite", MINRES()),
    ("indefinite", MINRES()),
    ("indefinite", GMRES()),
    ("contraction", GMRES(restart=8)),
    ("skew", GMRES(restart=25)),
]


@pytest.mark.parametrize(("kind", "solver"), SUITED)
@pytest.mark.parametrize(
    ("dtype", "rtol", "error"), [(torch.float64, 1e-11, 1e-8), (torch.float32, 1e-5, 1e-2)]
)
def test_matches_a_dense_solution(
    kind: str, solver: LinearSolver, dtype: torch.dtype, rtol: float, error: float
) -> None:
    matrix, right = matrices(kind).to(dtype), right_sides().to(dtype)
    solution = solve(solver, matrix, right, tolerance=rtol)
    assert solution.converged.all()
    assert (solution.residual <= rtol).all()
    reference = exact(matrix, right)
    distance = (solution.value.double() - reference).norm(dim=1) / reference.norm(dim=1)
    assert distance.max() <= error
    true = true_residual(matrix, right, solution)
    rounding = 0.1 * rtol + 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(solution.residual.double(), true, rtol=0, atol=rounding)
    absolute = solution.residual * right.norm(dim=1)
    torch.testing.assert_close(solution.residual_norm, absolute, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("kind", "solver"), [
    ("definite", CG()),
    ("indefinite", MINRES()),
    ("definite", MINRES()),
    ("nonsymmetric", GMRES(restart=60)),
    ("contraction", GMRES(restart=7)),
])  # fmt: skip
def test_steps_are_those_of_scipy(kind: str, solver: LinearSolver) -> None:
    rtol = 1e-9
    matrix, right = matrices(kind, 3, 60, condition=3.0), right_sides(3, 60)
    solution = solve(solver, matrix, right, tolerance=rtol)
    assert solution.converged.all()
    for sample in range(3):
        expected = scipy_steps(solver, matrix[sample], right[sample], rtol)
        assert abs(int(solution.steps[sample]) - expected) <= 1
        overhead = int(solution.evaluations[sample]) - int(solution.steps[sample])
        restart = solver.restart if isinstance(solver, GMRES) else 300
        assert overhead <= 1 + expected // restart


def scipy_steps(solver: LinearSolver, matrix: Tensor, right: Tensor, rtol: float) -> int:
    """Iterations of scipy's method until the true residual is at the tolerance."""
    a, b = matrix.numpy(), right.numpy()
    reached: list[float] = []

    def note(x: numpy.ndarray) -> None:
        reached.append(float(numpy.linalg.norm(b - a @ x) / numpy.linalg.norm(b)))

    if isinstance(solver, GMRES):
        scipy.sparse.linalg.gmres(
            a, b, rtol=rtol, atol=0, restart=solver.restart, maxiter=300, callback=reached.append,
            callback_type="pr_norm",
        )  # fmt: skip
    elif isinstance(solver, CG):
        scipy.sparse.linalg.cg(a, b, rtol=rtol, atol=0, callback=note)
    else:
        scipy.sparse.linalg.minres(a, b, rtol=rtol * 1e-3, callback=note)
    return 1 + next(k for k, residual in enumerate(reached) if residual <= rtol)


def test_inconsistent_systems_stall_at_a_least_squares_solution() -> None:
    matrix, right = matrices("singular"), right_sides()
    with pytest.warns(SolveWarning, match="STALLED"):
        solution = solve_linear(multiply, right, solver=MINRES(), max_steps=200, args=(matrix,))
    inverse = torch.from_numpy(numpy.linalg.pinv(matrix.numpy(), hermitian=True))
    best = multiply(right, inverse)
    least = (right - multiply(best, matrix)).norm(dim=1) / right.norm(dim=1)
    torch.testing.assert_close(solution.residual, least, rtol=1e-8, atol=0)


@pytest.mark.parametrize("solver", [CG(), MINRES(), GMRES(restart=6)])
def test_a_tolerance_below_rounding_stalls_a_linear_solve(solver: LinearSolver) -> None:
    matrix, right = matrices("definite").float(), right_sides().float()
    solution = solve(solver, matrix, right, tolerance=1e-12, max_steps=2000)
    assert (solution.status == Status.STALLED).all()
    assert (solution.evaluations < 500).all()
    assert (true_residual(matrix, right, solution) <= 2e-6).all()


def test_indefinite_matrices_are_detected() -> None:
    matrix, right = matrices("indefinite"), right_sides()
    matrix[0] = matrices("definite")[0]
    matrix[1] = -matrices("definite")[1]
    with pytest.warns(SolveWarning, match="INDEFINITE"):
        solution = solve_linear(multiply, right, args=(matrix,))
    assert solution.status.tolist() == [Status.CONVERGED] + 5 * [Status.INDEFINITE]
    assert solution.evaluations[1] == 2
    true = true_residual(matrix, right, solution)
    torch.testing.assert_close(solution.residual, true, rtol=1e-9, atol=1e-12)


METHODS = [CG(), MINRES(), GMRES(2), GMRES(20)]


def check(solution: Solution, matrix: Tensor, b: Tensor, rtol: float) -> None:
    """Residuals that are reported too small, beyond rounding, are lies."""
    value = solution.value
    assert value.isfinite().all()
    a, x, right = matrix.double(), value.double(), b.double()
    true = (right - multiply(x, a)).norm(dim=1)
    eps = torch.finfo(b.dtype).eps
    rounding = 60 * eps * (a.flatten(1).norm(dim=1) * x.norm(dim=1) + right.norm(dim=1))
    said = solution.residual_norm.double()
    allowed = 1.2 * said + 0.2 * rtol * right.norm(dim=1) + rounding
    assert (true <= allowed).all(), (true, said)


@pytest.mark.defect("A9")
@pytest.mark.parametrize("solver", METHODS, ids=repr)
def test_a_far_start_does_not_hide_its_rounding(solver: LinearSolver) -> None:
    """Cancellation of a start that is 1e9 times the solution leaves the residual of its rounding."""
    b, start = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([[1.3, 0.7], [-0.2, 0.9]])
    matrix = 1e9 * torch.eye(2).expand(2, 2, 2)
    for steps in (2, 3, 8):
        check(solve(solver, matrix, b, x0=start, max_steps=steps), matrix, b, 1e-6)


@pytest.mark.defect("A9")
@pytest.mark.parametrize("solver", METHODS, ids=repr)
def test_any_budget_ends_with_the_true_residual(solver: LinearSolver) -> None:
    generator = torch.Generator().manual_seed(2)
    for size in (1, 2, 5):
        half = torch.randn(6, size, size, dtype=torch.float64, generator=generator)
        half[0, -1] = half[0, 0]  # singular
        half[1] *= 10.0 ** torch.arange(size)
        matrix = (half @ half.mT).float()
        b = torch.randn(6, size, dtype=torch.float64, generator=generator).float()
        for steps in range(1, 8):
            count = Counter(multiply, 6)
            solution = solve_linear(
                count, b, solver=solver, args=(matrix, count.index), max_steps=steps,
                tolerance=1e-6, on_failure="ignore",
            )  # fmt: skip
            assert (solution.steps <= solution.evaluations).all()
            assert (solution.evaluations <= count.seen).all() and (count.seen <= steps).all()
            check(solution, matrix, b, 1e-6)


@pytest.mark.defect("A10")
@pytest.mark.parametrize("solver", METHODS, ids=repr)
def test_a_solution_beyond_half_precision_is_not_infinite(solver: LinearSolver) -> None:
    matrix = torch.diag_embed(torch.tensor([[1e-4, 2e-4], [1.0, 2.0]])).half()
    b = torch.tensor([[100.0, 300.0], [1.0, 2.0]]).half()
    solution = solve(solver, matrix, b, tolerance=0.1)
    assert solution.value.isfinite().all()
    assert solution.converged.tolist() == [False, True]
    assert solution.residual[0] == 1  # of zero


SOLVERS = [CG(), MINRES(), GMRES(restart=6), GMRES(restart=30)]
ALL = pytest.mark.parametrize("solver", SOLVERS, ids=str)


@ALL
def test_a_sample_does_not_depend_on_its_batch(solver: LinearSolver) -> None:
    matrix, right = mixed(20)
    together = solve(solver, matrix, right)
    assert together.converged.all()
    assert together.evaluations.unique().numel() > 2
    for i in range(0, 20, 3):
        alone = solve(solver, matrix[i : i + 1], right[i : i + 1])
        assert alone.converged.all()
        assert abs(int(alone.evaluations) - int(together.evaluations[i])) <= 1
        torch.testing.assert_close(alone.value[0], together.value[i], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("solver", [CG(), GMRES(restart=6)])
def test_finished_samples_leave_the_batch(solver: LinearSolver) -> None:
    """31 easy samples and a hard one: the easy ones are not billed for the hard one."""
    easy = matrices("definite", 31, 24, condition=2.0)
    hard = matrices("definite", 1, 24, condition=3e3)
    matrix, right = torch.cat([easy[:7], hard, easy[7:]]), right_sides(32, 24)
    count = Counter(multiply, 32)
    solution = solve_linear(
        count, right, solver=solver, args=(matrix, torch.arange(32)), max_steps=5000, tolerance=1e-6
    )
    assert solution.converged.all()
    assert solution.evaluations[7] > 2 * solution.evaluations[:7].max()
    assert count.sizes[0] == 32
    assert min(count.sizes) == 1
    assert sum(count.sizes) <= 1.06 * solution.evaluations.sum().item() + 32
    assert (true_residual(matrix, right, solution) <= 1.01e-6).all()


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
@pytest.mark.parametrize(("bad", "at", "compact"), [(torch.nan, 1, True), (torch.inf, 4, False)])
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


@pytest.mark.defect("A21")
@pytest.mark.parametrize("record", [False, True], ids=["engine", "loop"])
def test_the_residual_of_a_singular_system_is_the_true_one_after_a_restart(record: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(200, 8, 8, generator=generator) / 8**0.5
    matrix = a @ (a[:, :1].mT > 0).float().mul(a.mT) * 2.0**-23  # half of the columns, twice
    b = torch.randn(200, 8, generator=generator)
    solution = solve_linear(
        lambda v, matrix: (matrix @ v[:, :, None])[:, :, 0], b, args=(matrix,), solver=GMRES(5),
        tolerance=Tolerance(1e-6), max_steps=8, record=record, on_failure="ignore",
    )  # fmt: skip
    wide, x = matrix.double(), solution.value.double()
    true = (b.double() - (wide @ x[:, :, None])[:, :, 0]).norm(dim=1)
    size = torch.linalg.matrix_norm(wide) * x.norm(dim=1) + b.norm(dim=1)
    apart = (solution.residual_norm - true).abs()
    assert (apart <= 1e-2 * true + 50 * torch.finfo(torch.float32).eps * size).all()


@ALL
def test_starts(solver: LinearSolver) -> None:
    matrix, right = mixed(6)
    answer = exact(matrix, right)
    options: dict[str, Any] = {"solver": solver, "args": (matrix,), "max_steps": 300}
    solution = solve_linear(multiply, right, x0=answer, **options)
    assert (solution.steps == 0).all() and (solution.evaluations == 1).all()
    torch.testing.assert_close(solution.value, answer)
    near = answer + 1e-4 * right_sides(6, 40, seed=5)
    cold, warm = (solve_linear(multiply, right, x0=x0, **options) for x0 in (None, near))
    assert (warm.evaluations < cold.evaluations).all()
    torch.testing.assert_close(warm.value, cold.value, rtol=0, atol=1e-3)
    near[2, 0] = torch.nan
    solution = solve_linear(multiply, right, x0=near, on_failure="ignore", **options)
    assert solution.status[2] == Status.NONFINITE
    assert solution.value.isfinite().all()
    assert solution.residual[2] == 1


@pytest.mark.parametrize("solver", [MINRES(), GMRES(restart=6)])
def test_trace_and_callback(solver: LinearSolver) -> None:
    matrix, right = mixed(20)
    heard: list[Progress] = []
    solution = solve(solver, matrix, right, record=True, callback=heard.append)
    assert solution.trace is not None
    trace = solution.trace.residual
    assert trace.shape == (20, 1 + len(heard))
    assert (trace[:, 0] == 1).all()
    assert torch.equal((~trace[:, 1:].isnan()).sum(1), solution.evaluations)
    for number, progress in enumerate(heard, start=1):
        assert progress.evaluation == number and progress.energy is None
        assert progress.running == int((~progress.residual.isnan()).sum())
        torch.testing.assert_close(progress.residual, trace[:, number], equal_nan=True)
    last = torch.stack([row[~row.isnan()][-1] for row in trace])
    torch.testing.assert_close(last, solution.residual, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"matvec": 3}, TypeError, "matvec"),
    ({"b": torch.ones(3, 4, dtype=torch.int64)}, TypeError, r"\bb\b"),
    ({"b": [1.0]}, TypeError, r"\bb\b"),
    ({"b": (torch.ones(3, 4), torch.ones(2, 4))}, ValueError,
        r"\bb\b"),
    ({"solver": 3}, TypeError, "solver"),
    ({"on_failure": "shout"}, ValueError, "on_failure"),
    ({"args": [torch.ones(3)]}, TypeError, "args"),
    ({"args": (torch.ones(4, 4),)}, ValueError, "args"),
    ({"x0": torch.ones(3, 5)}, ValueError, "x0"),
    ({"x0": torch.ones(3, 4).double()}, TypeError, "x0"),
    ({"x0": torch.ones(3, 4, device="meta")}, ValueError, "x0"),
    ({"matvec": lambda v: v[:, :2]}, ValueError, "matvec"),
    ({"matvec": lambda v: v.double()}, TypeError, "matvec"),
])  # fmt: skip
def test_errors_say_what_came_and_what_was_expected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"matvec": lambda v: v, "b": torch.ones(3, 4), **change}
    with pytest.raises(error, match=message):
        solve_linear(arguments.pop("matvec"), arguments.pop("b"), **arguments)

"""CG, MINRES and GMRES against dense solutions and scipy; what they say where they must fail."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest
import scipy.sparse.linalg
import torch
from torch import Tensor

from cases.linear import exact, matrices, multiply, right_sides, true_residual
from solvers import CG, GMRES, MINRES, LinearSolver, Solution, SolveWarning, Status, solve_linear

SUITED = [
    ("definite", CG()),
    ("definite", MINRES()),
    ("definite", GMRES()),
    ("indefinite", MINRES()),
    ("indefinite", GMRES()),
    ("nonsymmetric", GMRES(restart=25)),
    ("contraction", GMRES()),
    ("contraction", GMRES(restart=8)),
    ("skew", GMRES(restart=25)),
]


@pytest.mark.parametrize(("kind", "solver"), SUITED)
@pytest.mark.parametrize(
    ("dtype", "rtol", "error"),
    [(torch.float64, 1e-11, 1e-8), (torch.float64, 1e-4, 1e-1), (torch.float32, 1e-5, 1e-2)],
)
def test_matches_a_dense_solution(
    kind: str, solver: LinearSolver, dtype: torch.dtype, rtol: float, error: float
) -> None:
    matrix, right = matrices(kind).to(dtype), right_sides().to(dtype)
    solution = solve_linear(
        multiply, right, solver=solver, tolerance=rtol, max_steps=400, args=(matrix,)
    )
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


@pytest.mark.parametrize("rtol", [1e-2, 1e-9])
@pytest.mark.parametrize(("kind", "solver"), [
    ("definite", CG()),
    ("indefinite", MINRES()),
    ("definite", MINRES()),
    ("nonsymmetric", GMRES(restart=60)),
    ("contraction", GMRES(restart=7)),
])  # fmt: skip
def test_steps_are_those_of_scipy(kind: str, solver: LinearSolver, rtol: float) -> None:
    matrix, right = matrices(kind, 3, 60, condition=3.0), right_sides(3, 60)
    solution = solve_linear(
        multiply, right, solver=solver, tolerance=rtol, max_steps=300, args=(matrix,)
    )
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


def test_minimal_residuals_never_rise_and_agree() -> None:
    """On a symmetric matrix MINRES and GMRES without restart minimise over the same space."""
    matrix, right = matrices("indefinite"), right_sides()
    traces = []
    for solver in (MINRES(), GMRES(restart=50)):
        solution = solve_linear(
            multiply, right, solver=solver, tolerance=1e-6, args=(matrix,), record=True
        )
        assert solution.trace is not None
        traces.append(solution.trace.residual[:, :12])
        assert (traces[-1].diff(dim=1) <= 1e-14).all()
    torch.testing.assert_close(traces[0], traces[1], rtol=1e-7, atol=0)


def test_inconsistent_systems_stall_at_a_least_squares_solution() -> None:
    matrix, right = matrices("singular"), right_sides()
    with pytest.warns(SolveWarning, match="STALLED 6 of 6"):
        solution = solve_linear(multiply, right, solver=MINRES(), max_steps=200, args=(matrix,))
    inverse = torch.from_numpy(numpy.linalg.pinv(matrix.numpy(), hermitian=True))
    best = multiply(right, inverse)
    least = (right - multiply(best, matrix)).norm(dim=1) / right.norm(dim=1)
    torch.testing.assert_close(solution.residual, least, rtol=1e-8, atol=0)


@pytest.mark.parametrize(
    ("solver", "status"),
    [(CG(), Status.INDEFINITE), (MINRES(), Status.STALLED), (GMRES(), Status.STALLED)],
)
def test_the_zero_matrix(solver: LinearSolver, status: Status) -> None:
    right = right_sides()
    solution = solve_linear(torch.zeros_like, right, solver=solver, on_failure="ignore")
    assert (solution.status == status).all()
    assert (solution.value == 0).all()
    torch.testing.assert_close(solution.residual, torch.ones_like(solution.residual))
    assert (solution.evaluations <= 2).all()


def test_a_rotation_stalls_restarted_gmres() -> None:
    """Cyclic shifts: no Krylov space below the full one lowers the residual."""
    right = torch.eye(8, dtype=torch.float64)[:2]

    def shift(vectors: Tensor) -> Tensor:
        return vectors.roll(1, dims=1)

    short = solve_linear(shift, right, solver=GMRES(restart=5), on_failure="ignore")
    assert (short.status == Status.STALLED).all()
    assert (short.residual == 1).all()
    assert (short.steps == 5).all()
    full = solve_linear(shift, right, solver=GMRES(restart=8))
    assert full.converged.all()
    assert (full.steps == 8).all()


@pytest.mark.parametrize("solver", [CG(), MINRES(), GMRES(restart=6)])
def test_rounding_above_the_tolerance_stalls(solver: LinearSolver) -> None:
    matrix, right = matrices("definite").float(), right_sides().float()
    solution = solve_linear(
        multiply, right, solver=solver, tolerance=1e-12, max_steps=2000, args=(matrix,),
        on_failure="ignore",
    )  # fmt: skip
    assert (solution.status == Status.STALLED).all()
    assert (solution.evaluations < 500).all()
    assert (true_residual(matrix, right, solution) <= 2e-6).all()


def test_indefinite_matrices_are_detected() -> None:
    matrix, right = matrices("indefinite"), right_sides()
    matrix[0] = matrices("definite")[0]
    matrix[1] = -matrices("definite")[1]
    with pytest.warns(SolveWarning, match="INDEFINITE 5"):
        solution = solve_linear(multiply, right, args=(matrix,))
    assert solution.status[0] == Status.CONVERGED
    assert (solution.status[1:] == Status.INDEFINITE).all()
    assert solution.evaluations[1] == 1
    assert (solution.residual <= 1).all()
    true = true_residual(matrix, right, solution)
    torch.testing.assert_close(solution.residual, true, rtol=1e-9, atol=1e-12)


METHODS = [CG(), MINRES(), GMRES(2), GMRES(20)]


def solve(matrix: Tensor, b: Tensor, solver: LinearSolver, **options: Any) -> Solution:
    """The solution, of which no NumPy warning may come."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return solve_linear(
            multiply, b, args=(matrix,), solver=solver, on_failure="ignore", **options
        )


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
def test_a_singular_system_is_not_called_solved() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        row = torch.randn(5, 1, 2, dtype=torch.float64, generator=generator)
        matrix = torch.cat([row, 2 * row], 1)
        b = torch.randn(5, 2, dtype=torch.float64, generator=generator)
        solution = solve(matrix, b, GMRES(2), max_steps=2)
        check(solution, matrix, b, 1e-6)
        assert not solution.converged.any()


@pytest.mark.defect("A9")
@pytest.mark.parametrize("solver", METHODS, ids=repr)
def test_a_far_start_does_not_hide_its_rounding(solver: LinearSolver) -> None:
    """Cancellation of a start that is 1e9 times the solution leaves the residual of its rounding."""
    b = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    matrix = torch.diag_embed(torch.tensor([[1e9, 1e9], [1e9, 1e9]]))
    start = torch.tensor([[1.3, 0.7], [-0.2, 0.9]])
    for steps in (2, 3, 8):
        check(solve(matrix, b, solver, x0=start, max_steps=steps), matrix, b, 1e-6)


@pytest.mark.defect("A9")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", METHODS, ids=repr)
def test_any_budget_ends_with_the_true_residual(solver: LinearSolver, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    for size in (1, 2, 5):
        half = torch.randn(6, size, size, dtype=torch.float64, generator=generator)
        half[0, -1] = half[0, 0]  # singular
        half[1] *= 10.0 ** torch.arange(size)
        matrix = (half @ half.mT).to(dtype)
        b = torch.randn(6, size, dtype=torch.float64, generator=generator).to(dtype)
        for steps in range(1, 8):
            solution = solve(matrix, b, solver, max_steps=steps, tolerance=1e-6)
            assert (solution.evaluations <= steps).all()
            check(solution, matrix, b, 1e-6)


@pytest.mark.defect("A10")
@pytest.mark.parametrize("rtol", [1e-6, 1e-1])
@pytest.mark.parametrize("solver", METHODS, ids=repr)
def test_a_solution_beyond_half_precision_is_not_infinite(
    solver: LinearSolver, rtol: float
) -> None:
    matrix = torch.diag_embed(torch.tensor([[1e-4, 2e-4], [1.0, 2.0]])).half()
    b = torch.tensor([[100.0, 300.0], [1.0, 2.0]]).half()
    solution = solve(matrix, b, solver, tolerance=rtol)
    assert solution.value.isfinite().all()
    assert solution.status[0] != Status.CONVERGED
    assert solution.converged[1]
    assert solution.residual[0] == 1  # of zero


@pytest.mark.defect("A9")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_definite_matrix_is_never_called_indefinite(dtype: torch.dtype) -> None:
    """Asked for the impossible, CG goes on until the curvature of its directions underflows."""
    torch.manual_seed(0)
    root = torch.randn(6, 5, 5, dtype=dtype)
    matrix = 2.0**-60 * (root @ root.mT + torch.eye(5, dtype=dtype))
    solution = solve_linear(
        lambda v: (matrix @ v[..., None])[..., 0], torch.randn(6, 5, dtype=dtype),
        solver=CG(), tolerance=0.0, max_steps=200, on_failure="ignore", compact=False,
    )  # fmt: skip
    assert not (solution.status == Status.INDEFINITE).any()

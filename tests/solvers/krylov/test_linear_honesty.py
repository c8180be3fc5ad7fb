"""The residual of a linear solve is that of its value, which is finite; nothing else is heard."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from solvers import CG, GMRES, MINRES, LinearSolver, Solution, Status, solve_linear

METHODS = [CG(), MINRES(), GMRES(2), GMRES(20)]


def multiply(v: Tensor, matrix: Tensor) -> Tensor:
    return (matrix @ v.unsqueeze(2)).squeeze(2)


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

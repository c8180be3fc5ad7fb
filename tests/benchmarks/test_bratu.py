"""A partial differential equation has the same solution and gradient as a root and as a fixed point."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("tyro", reason="the benchmark needs the extra [examples]")

from benchmarks import bratu


def problem() -> tuple[Tensor, Tensor]:
    start = torch.zeros(2, 9, 9, dtype=torch.float64)
    return start, torch.tensor([1.0, 6.0], dtype=torch.float64, requires_grad=True)


def test_sine_transforms_invert_the_laplacian() -> None:
    field = torch.randn(2, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(bratu.laplace(bratu.inverse_laplace(field)), field)


@pytest.mark.parametrize("name", list(bratu.ways(*problem(), 1)))
def test_value_and_gradient(name: str) -> None:
    """The reference gradient solves the linear system of the discretised problem densely."""
    start, strength = problem()
    solution = bratu.ways(start, strength, 3000)[name]()
    adjoint = solution.adjoint
    assert solution.statuses == ["CONVERGED"] * 2
    expected = bratu.exact(start, strength).value.detach()
    torch.testing.assert_close(solution.value.detach(), expected, rtol=1e-5, atol=1e-7)
    (found,) = torch.autograd.grad(solution.value.square().sum(), strength)
    assert adjoint.solution is not None and adjoint.solution.converged.all()
    for row in range(2):
        u, s = expected[row : row + 1], strength[row : row + 1].detach()
        matrix, slope = torch.autograd.functional.jacobian(bratu.residual, (u, s))
        moved = torch.linalg.solve(matrix.reshape(81, 81), -slope.reshape(81))
        torch.testing.assert_close(found[row], 2 * u.flatten() @ moved, rtol=1e-5, atol=1e-9)

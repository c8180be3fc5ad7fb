"""Units do not matter: a problem, or a loss, times 1e-3 or 1e3 takes the same steps."""

from __future__ import annotations

import pytest
import torch

from cases.solves import SOLVERS, solve
from problems.zoo import make, scaled
from solvers import CG, GMRES, MINRES, Implicit, LinearSolver, fixed_point

# Powers of two move no rounding error, so that even a chaotic solve repeats itself exactly.
EXACT = [2.0**-10, 2.0**10]


@pytest.mark.parametrize("factor", EXACT)
@pytest.mark.parametrize("safeguarded", [False, True])
@pytest.mark.parametrize("name", ["energy_rosenbrock_10", "linear_expanding"])
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_powers_of_two_change_nothing_at_all(
    solver: str, name: str, safeguarded: bool, factor: float
) -> None:
    problem = make(name)
    original = solve(problem, solver, safeguarded=safeguarded, max_steps=80)
    other = solve(scaled(problem, factor), solver, safeguarded=safeguarded, max_steps=80)
    assert other.evaluations.tolist() == original.evaluations.tolist()
    assert other.status.tolist() == original.status.tolist()
    assert torch.equal(other.value / factor, original.value)
    assert torch.equal(other.residual, original.residual)


@pytest.mark.parametrize("linear", [None, CG(), MINRES(), GMRES()])
@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_scaled_loss_costs_the_same(factor: float, linear: LinearSolver | None) -> None:
    """torchdeq's absolute backward tolerance is never met for a large loss in float32."""
    problem = make("linear_symmetric_0.9", dtype=torch.float32)
    matrix, offset = problem.args
    offset.requires_grad_()
    gradients, products = [], []
    for scale in (1.0, factor):
        solution = fixed_point(
            problem.f, problem.z0, (matrix, offset), tolerance=1e-4,
            max_steps=100, adjoint=Implicit(solver=linear),
        )  # fmt: skip
        loss = scale * solution.value.pow(3).sum()
        gradients.append(torch.autograd.grad(loss, offset)[0] / scale)
        report = solution.adjoint.solution
        assert report is not None
        assert bool(report.converged.all())
        products.append(report.evaluations.tolist())
    assert products[0] == products[1]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-3)

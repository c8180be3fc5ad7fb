"""Products with Jacobians: against the dense matrix, and zero where nothing depends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from solvers import Newton, Status, fixed_point
from solvers.core.jacobian import gradients, pullback, pushforward


def recorded() -> tuple[Tensor, Tensor, Tensor]:
    """A nonlinear map at a point: (2, 3) -> (2, 3), and its dense Jacobians (2, 3, 3)."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    point = torch.randn(2, 3, generator=generator, dtype=torch.float64).requires_grad_()
    output = torch.tanh(point @ weight)
    slopes = 1 - output.detach().square()
    return output, point, slopes.unsqueeze(2) * weight.mT


def test_both_products_are_those_of_the_dense_jacobian() -> None:
    output, point, dense = recorded()
    v = torch.randn(2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    transposed, forward = pullback(output, point), pushforward(output, point)
    for _ in range(2):  # the graph is kept
        torch.testing.assert_close(transposed(v), torch.einsum("bij,bi->bj", dense, v))
        torch.testing.assert_close(forward(v), torch.einsum("bij,bj->bi", dense, v))


def test_products_are_zero_where_nothing_depends_on_the_point() -> None:
    point, other = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    v = torch.ones(2, 3)
    for output in (2 * other, other.detach()):
        assert torch.equal(pullback(output, point)(v), torch.zeros(2, 3))
        assert torch.equal(pushforward(output, point)(v), torch.zeros(2, 3))
        assert gradients(output, [point], v) == [None]
    assert torch.equal(pullback(None, point)(v), torch.zeros(2, 3))


def test_a_linear_map_has_a_pushforward() -> None:
    point = torch.ones(2, 3, requires_grad=True)
    assert torch.equal(pushforward(3 * point, point)(torch.ones(2, 3)), torch.full((2, 3), 3.0))


@pytest.mark.parametrize("symmetric", [False, True])
def test_newton_solves_a_map_that_does_not_depend_on_the_state(symmetric: bool) -> None:
    weight = torch.ones(2, 3, requires_grad=True)

    def constant(z: Tensor) -> Tensor:
        return 2 * weight

    constant.symmetric = symmetric  # type: ignore[attr-defined]
    solution = fixed_point(constant, torch.zeros(2, 3), solver=Newton(), compact=False)
    assert (solution.status == Status.CONVERGED).all()
    (gradient,) = torch.autograd.grad(solution.value.sum(), weight)
    torch.testing.assert_close(gradient, torch.full((2, 3), 2.0))

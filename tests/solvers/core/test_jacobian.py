"""Products with Jacobians: against the dense matrix, and zero where nothing depends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from solvers import Newton, Status, fixed_point


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

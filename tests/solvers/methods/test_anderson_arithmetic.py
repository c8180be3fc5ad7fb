"""Anderson's step of a recorded solve, whose differences are kept in lists, is that of the ring."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import solvers


@pytest.mark.parametrize("damping", [1.0, 0.7])
@pytest.mark.parametrize("memory", [1, 3])
def test_both_histories_agree(damping: float, memory: int) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(6, 6, dtype=torch.float64)
    matrix *= 0.95 / torch.linalg.matrix_norm(matrix, 2)
    x = torch.randn(40, 6, dtype=torch.float64) * torch.logspace(-3, 3, 40)[:, None]

    def f(z: Tensor, x: Tensor) -> Tensor:
        # Some samples overflow when they are far out: their steps are rejected, their history forgotten.
        return torch.where(z.abs() > 20 * x.abs().max(), torch.inf, torch.tanh(z @ matrix.T) + x)

    found = []
    for adjoint in (None, solvers.Unrolled()):
        solution = solvers.fixed_point(
            f,
            torch.zeros_like(x),
            (x,),
            solver=solvers.Anderson(memory=memory, damping=damping),
            tolerance=solvers.Tolerance(1e-9),
            max_steps=200,
            record=True,
            adjoint=adjoint,
        )
        assert solution.converged.all() and solution.trace is not None
        found.append(solution)
    torch.testing.assert_close(found[0].value, found[1].value.detach(), rtol=1e-8, atol=0)
    assert (found[0].evaluations - found[1].evaluations).abs().max() <= 2
    first, second = (each.trace.residual[:, :6] for each in found)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-9, equal_nan=True)

"""Anderson's step in NumPy, on small problems on the CPU, is that of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import solvers
from solvers.methods import anderson, history


@pytest.mark.parametrize("damping", [1.0, 0.7])
@pytest.mark.parametrize("memory", [1, 3])
def test_both_arithmetics_agree(
    damping: float, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(6, 6, dtype=torch.float64)
    matrix *= 0.95 / torch.linalg.matrix_norm(matrix, 2)
    x = torch.randn(40, 6, dtype=torch.float64) * torch.logspace(-3, 3, 40)[:, None]

    def f(z: Tensor, x: Tensor) -> Tensor:
        # Some samples overflow when they are far out: their steps are rejected, their history forgotten.
        return torch.where(z.abs() > 20 * x.abs().max(), torch.inf, torch.tanh(z @ matrix.T) + x)

    found = []
    for in_numpy in (True, False):
        if not in_numpy:
            monkeypatch.setattr(anderson, "fits_numpy", lambda tensor: False)
            monkeypatch.setattr(history, "fits_numpy", lambda tensor: False)
        solution = solvers.fixed_point(
            f,
            torch.zeros_like(x),
            (x,),
            solver=solvers.Anderson(memory=memory, damping=damping),
            tolerance=solvers.Tolerance(1e-9),
            max_steps=200,
            record=True,
        )
        assert solution.converged.all() and solution.trace is not None
        found.append(solution)
    torch.testing.assert_close(found[0].value, found[1].value, rtol=1e-8, atol=0)
    assert (found[0].evaluations - found[1].evaluations).abs().max() <= 2
    first, second = (each.trace.residual[:, :6] for each in found)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-9, equal_nan=True)

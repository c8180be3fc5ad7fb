"""Corners: whole batches, budgets, inference mode, histories that shrink."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from implicit_attn import DEQ
from implicit_attn.energies import Quadratic, ReLUFeedForward
from solvers import Implicit, Newton, SolveError, fixed_point


def test_newton_keeps_a_batch_whole_that_f_closes_over() -> None:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    seen: set[int] = set()

    def f(z: Tensor) -> Tensor:
        seen.add(z.shape[0])
        return 0.5 * torch.sin(z) + x

    options: dict[str, Any] = {"tolerance": 1e-10, "max_steps": 60, "adjoint": None}
    whole = fixed_point(f, torch.zeros(6, 4).double(), solver=Newton(), compact=False, **options)
    assert whole.converged.all()
    assert seen == {6}
    assert (whole.evaluations <= 60).all()
    alone = fixed_point(
        lambda z, x: 0.5 * torch.sin(z) + x, torch.zeros_like(x), (x,), solver=Newton(), **options
    )
    torch.testing.assert_close(whole.value, alone.value, rtol=1e-9, atol=0)


def test_an_error_of_f_after_shrinking_keeps_its_type() -> None:
    rate = torch.tensor([0.01, 0.01, 0.9, 0.9], dtype=torch.float64)

    def f(z: Tensor, rate: Tensor) -> Tensor:
        if z.shape[0] < 4:
            solution = fixed_point(
                lambda y: 2 * y + 1, z, solver=solvers.Forward(), max_steps=2, on_failure="raise"
            )
            return solution.value
        return rate[:, None] * z + 1

    with pytest.raises(SolveError, match=r"2 samples that are still being solved"):
        fixed_point(f, torch.zeros(4, 3).double(), (rate,), solver=solvers.Forward(), max_steps=80)


def saddle_gradient(max_steps: int) -> solvers.Solution:
    """Adjoint of stationary points where some Hessians are indefinite and none is easy."""
    generator = torch.Generator().manual_seed(0)
    size = 40
    basis = torch.linalg.qr(torch.randn(3, size, size, generator=generator).double())[0]
    eigenvalues = torch.linspace(0.3, 30, size).double().repeat(3, 1)
    eigenvalues[1, 5] = -2.0
    hessian = basis @ torch.diag_embed(eigenvalues) @ basis.mT
    x = torch.randn(3, size, generator=generator).double().requires_grad_()

    def energy(z: Tensor, hessian: Tensor, x: Tensor) -> Tensor:
        return 0.5 * (z * (hessian @ z[:, :, None])[:, :, 0]).sum(1) - (x * z).sum(1)

    start = torch.linalg.solve(hessian, x.detach())
    adjoint = Implicit(tolerance=1e-9, max_steps=max_steps, on_failure="ignore")
    solution = fixed_point(solvers.Descent(energy), start, (hessian, x), adjoint=adjoint)
    solution.value.sum().backward()
    assert solution.adjoint.solution is not None
    return solution.adjoint.solution


def test_the_adjoint_keeps_its_budget_across_cg_and_minres() -> None:
    for budget in (10, 25, 400):
        assert (saddle_gradient(budget).evaluations <= budget).all()
    assert saddle_gradient(400).converged.all()


@pytest.mark.parametrize("solver", [None, Newton(), solvers.Anderson()])
def test_inference_mode(solver: solvers.Solver | None) -> None:
    torch.manual_seed(0)
    layer = DEQ(0.3 * ReLUFeedForward(6, 8) + Quadratic(), solver=solver)
    x = torch.randn(3, 4, 6)
    with torch.inference_mode():
        inside = layer(x)
        plain = fixed_point(
            solvers.Descent(lambda z, x: 0.5 * (z - x).square().flatten(1).sum(1)),
            torch.zeros(2, 3), (torch.ones(2, 3),), solver=solver,
        )  # fmt: skip
    torch.testing.assert_close(inside, layer(x).detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(plain.value, torch.ones(2, 3), rtol=1e-3, atol=1e-4)

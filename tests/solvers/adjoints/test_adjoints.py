"""Derivatives through a fixed point: first and second, against finite differences and dense algebra."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cases.solves import plain_batch, tanh_layer
from solvers import (
    CG,
    GMRES,
    LBFGS,
    MINRES,
    Adjoint,
    Anderson,
    Broyden,
    Descent,
    Forward,
    GradientDescent,
    Implicit,
    LinearSolver,
    Newton,
    Phantom,
    Solver,
    Tolerance,
    Unrolled,
    fixed_point,
)

TIGHT = Tolerance(rtol=1e-13)


def exact(solver: LinearSolver | None = None) -> Implicit:
    return Implicit(solver=solver, tolerance=1e-12, max_steps=200)


def energy(z: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """A smooth convex energy whose minimiser depends on x and the matrix nonlinearly."""
    inner = torch.einsum("bij,bj->bi", matrix, z)
    return inner.cosh().log().sum(1) + 0.5 * (z - x).square().sum(1)


def descent_inputs(batch: int = 2, dim: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    matrix = 0.5 * torch.randn(batch, dim, dim, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), matrix.requires_grad_()


def layer_inputs(batch: int = 2, dim: int = 3) -> tuple[Tensor, Tensor]:
    _, _, (weight, x) = plain_batch(batch, dim)
    return weight.requires_grad_(), x.requires_grad_()


def layer_solve(adjoint: Adjoint, solver: Solver, **options: object) -> Callable[..., Tensor]:
    def solve(weight: Tensor, x: Tensor) -> Tensor:
        return fixed_point(
            tanh_layer, torch.zeros_like(x), (weight, x), solver=solver, tolerance=TIGHT,
            max_steps=200, adjoint=adjoint, on_failure="ignore", **options,  # type: ignore[arg-type]
        ).value  # fmt: skip

    return solve


def descent_solve(adjoint: Adjoint, solver: Solver) -> Callable[..., Tensor]:
    def solve(x: Tensor, matrix: Tensor) -> Tensor:
        return fixed_point(
            Descent(energy, 0.5), torch.zeros_like(x), (x, matrix), solver=solver,
            tolerance=TIGHT, max_steps=300, adjoint=adjoint, on_failure="ignore",
        ).value  # fmt: skip

    return solve


@pytest.mark.parametrize("linear", [None, GMRES(), GMRES(restart=2)])
def test_implicit_on_a_map(linear: LinearSolver | None) -> None:
    solve = layer_solve(exact(linear), Anderson())
    assert gradcheck(solve, layer_inputs())
    assert gradgradcheck(solve, layer_inputs(), fast_mode=linear is not None)


@pytest.mark.parametrize("linear", [None, MINRES()])
def test_implicit_on_an_energy(linear: LinearSolver | None) -> None:
    solve = descent_solve(exact(linear), LBFGS())
    assert gradcheck(solve, descent_inputs())
    assert gradgradcheck(solve, descent_inputs(), fast_mode=True)


@pytest.mark.parametrize("solver", [Broyden(), Newton()])
def test_implicit_does_not_care_who_solved(solver: Solver) -> None:
    assert gradcheck(layer_solve(exact(), solver), layer_inputs())


# A fixed number of steps: the iteration itself is then a smooth function.
UNROLLED: list[tuple[Solver, int]] = [
    (Forward(damping=0.5), 5),
    (Anderson(memory=3, damping=0.7), 6),
    (Broyden(memory=2), 5),
    (GradientDescent(momentum=0.5, nesterov=True), 5),
    (GradientDescent("auto"), 5),
]


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize(("solver", "steps"), UNROLLED)
def test_unrolled_steps_of_a_map(solver: Solver, steps: int, checkpoint: bool) -> None:
    def solve(weight: Tensor, x: Tensor, z0: Tensor) -> Tensor:
        return fixed_point(
            tanh_layer, z0, (weight, x), solver=solver, tolerance=0.0,
            max_steps=steps, adjoint=Unrolled(checkpoint), on_failure="ignore",
        ).value  # fmt: skip

    weight, x = layer_inputs(dim=4)
    inputs = (weight, x, torch.full_like(x, 0.1).requires_grad_())
    assert gradcheck(solve, inputs)
    if not checkpoint or isinstance(solver, (Forward, Anderson)):
        assert gradgradcheck(solve, inputs, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("solver", [LBFGS(memory=2), GradientDescent("auto")])
def test_unrolled_steps_of_an_energy(solver: Solver, checkpoint: bool) -> None:
    def solve(x: Tensor, matrix: Tensor) -> Tensor:
        return fixed_point(
            Descent(energy, 0.5), torch.zeros_like(x), (x, matrix), solver=solver,
            tolerance=0.0, max_steps=5, adjoint=Unrolled(checkpoint),
            on_failure="ignore",
        ).value  # fmt: skip

    assert gradcheck(solve, descent_inputs(), fast_mode=True)
    assert gradgradcheck(solve, descent_inputs(), atol=1e-4, fast_mode=True)


def test_newton_refuses_to_be_unrolled() -> None:
    f, z0, args = plain_batch(2)
    with pytest.raises(RuntimeError, match="cannot be unrolled; use adjoint=Implicit"):
        fixed_point(f, z0, args, solver=Newton(), adjoint=Unrolled())


def dense(weight: Tensor, x: Tensor, value: Tensor) -> Tensor:
    """``I - J`` of the tanh layer at its solution, (B, D, D), as a function of everything."""
    slope = 1 - value.square()
    return torch.eye(x.shape[1], dtype=x.dtype) - slope.unsqueeze(2) * weight


def relative_error(mine: Tensor, reference: Tensor) -> float:
    return float((mine - reference).norm() / reference.norm())


@pytest.mark.parametrize("linear", [None, GMRES(), GMRES(restart=4)])
def test_first_derivative_against_a_dense_solve(linear: LinearSolver | None) -> None:
    f, z0, (weight, x) = plain_batch(8, 20)
    x.requires_grad_()
    weight.requires_grad_()
    solution = fixed_point(
        f, z0, (weight, x), tolerance=1e-11, max_steps=200,
        adjoint=Implicit(linear, max_steps=300),
    )  # fmt: skip
    cotangent = torch.randn(8, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mine = torch.autograd.grad(solution.value, (weight, x), cotangent)
    z = solution.value.detach()
    for _ in range(5):  # the solution to rounding, by Newton steps
        z = z + torch.linalg.solve(dense(weight, x, z).detach(), f(z, weight, x).detach() - z)
    u = torch.linalg.solve(dense(weight, x, z).mT.detach(), cotangent)
    inner = u * (1 - z.square())
    assert relative_error(mine[1], inner) <= 1e-9
    assert relative_error(mine[0], inner.unsqueeze(2) * z.unsqueeze(1)) <= 1e-9
    report = solution.adjoint.solution
    assert report is not None
    torch.testing.assert_close(report.value, u, rtol=1e-8, atol=1e-10)
    assert (report.residual <= 1e-11).all()


@pytest.mark.parametrize("linear", [None, CG(), MINRES(), GMRES()])
def test_hessian_vector_products_against_dense_ones(linear: LinearSolver | None) -> None:
    """``z* = argmin E``, loss ``L(z*(x))``: its Hessian in x by differentiating a dense Newton map."""
    x, matrix = descent_inputs(3, 5)
    matrix = matrix.detach()
    update = Descent(energy, 0.5)
    solution = fixed_point(
        update, torch.zeros_like(x), (x, matrix), tolerance=1e-12, max_steps=300,
        adjoint=Implicit(linear, tolerance=1e-12, max_steps=300),
    )  # fmt: skip
    vector = torch.randn(3, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(solution.value.pow(3).sum(), x, create_graph=True)
    (product,) = torch.autograd.grad(gradient, x, vector)

    def loss(x: Tensor) -> Tensor:
        # two exact Newton steps from the solution: right to second order in x
        z = solution.value.detach()
        for _ in range(2):
            inner = torch.einsum("bij,bj->bi", matrix, z)
            slope = torch.einsum("bij,bi->bj", matrix, inner.tanh()) + z - x
            curvature = 1 - inner.tanh().square()
            hessian = torch.einsum("bij,bi,bik->bjk", matrix, curvature, matrix)
            hessian = hessian + torch.eye(5, dtype=x.dtype)
            z = z - torch.linalg.solve(hessian, slope)
        return z.pow(3).sum()

    expected: Any = torch.autograd.functional.hvp(loss, x.detach(), vector)[1]
    (first,) = torch.autograd.grad(loss(x), x)
    assert relative_error(gradient.detach(), first) <= 1e-9
    assert relative_error(product, expected) <= 1e-9


@pytest.mark.parametrize(("steps", "damping"), [(1, 1.0), (3, 1.0), (4, 0.5)])
def test_phantom_is_its_formula(steps: int, damping: float) -> None:
    f, z0, (weight, x) = plain_batch(3)
    x.requires_grad_()
    solution = fixed_point(f, z0, (weight, x), tolerance=TIGHT, max_steps=200,
                           adjoint=Phantom(steps, damping), on_failure="ignore")  # fmt: skip
    (mine,) = torch.autograd.grad(solution.value.pow(2).sum(), x)
    z = solution.value.detach()
    for _ in range(steps):
        z = (1 - damping) * z + damping * f(z, weight, x)
    (expected,) = torch.autograd.grad(z.pow(2).sum(), x)
    torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)
    plain = fixed_point(f, z0, (weight, x), tolerance=TIGHT, max_steps=200, adjoint=None,
                        on_failure="ignore")  # fmt: skip
    assert torch.equal(solution.value, plain.value)  # the value is the solution itself

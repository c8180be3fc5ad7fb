"""Graphs around a solve, and what the adjoint solve says about itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import solvers
from cases.solves import plain_batch
from solvers import Adjoint, AdjointReport, Implicit, OneStep, Phantom, Unrolled, fixed_point

TIGHT = solvers.Tolerance(rtol=1e-12)
EXACT: list[Adjoint] = [Implicit(tolerance=TIGHT, max_steps=200), Unrolled()]
ALL: list[Adjoint] = [*EXACT, Unrolled(checkpoint=True), Phantom(3), OneStep()]


def solve(weight: Tensor, x: Tensor, adjoint: Adjoint) -> solvers.Solution:
    f, _, _ = plain_batch(1)
    return fixed_point(
        f, torch.zeros_like(x), (weight, x), tolerance=TIGHT, max_steps=100, adjoint=adjoint
    )


def inputs() -> tuple[Tensor, Tensor]:
    _, _, (weight, x) = plain_batch(3, 4)
    return weight.requires_grad_(), x.requires_grad_()


@pytest.mark.parametrize("adjoint", ALL)
def test_backward_twice(adjoint: Adjoint) -> None:
    weight, x = inputs()
    loss = solve(weight, x, adjoint).value.square().sum()
    first = torch.autograd.grad(loss, (weight, x), retain_graph=True)
    second = torch.autograd.grad(loss, (weight, x))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (weight, x))


@pytest.mark.parametrize("adjoint", EXACT)
def test_a_solve_inside_f(adjoint: Adjoint) -> None:
    """Bilevel: the map of the outer solve is itself a solve; exact where both are."""
    weight, x = inputs()

    def outer(z: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return 0.5 * solve(weight, x + 0.3 * z, adjoint).value

    def loss(x: Tensor) -> Tensor:
        return fixed_point(
            outer, torch.zeros_like(x), (weight, x), tolerance=1e-11, max_steps=100,
            adjoint=adjoint,
        ).value.sum()  # fmt: skip

    (gradient,) = torch.autograd.grad(loss(x), x)
    direction = torch.ones_like(x)
    ends = [float(loss(x.detach() + sign * 1e-5 * direction).detach()) for sign in (1, -1)]
    assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(
        float((gradient * direction).sum()), rel=1e-6
    )


def third(adjoint: Adjoint) -> Tensor:
    _, x = inputs()
    weight = inputs()[0].detach()
    value = solve(weight, x, adjoint).value.sum()
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return torch.autograd.grad(second.sum(), x)[0]


def test_third_derivatives_raise_or_are_right() -> None:
    with pytest.raises(RuntimeError, match=r"third derivatives .* use adjoint=Unrolled"):
        third(Implicit(tolerance=TIGHT))
    assert third(Unrolled()).isfinite().all()
    assert bool((third(Unrolled()) != 0).any())


@pytest.mark.parametrize("adjoint", [Implicit(), Phantom(3), OneStep()])
@pytest.mark.parametrize("solver", [solvers.Forward(), solvers.Anderson()])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_forward_mode_raises(adjoint: Adjoint, requires_grad: bool, solver: solvers.Solver) -> None:
    """Their derivative is not that of the iterations, which forward mode would return."""
    f, z0, (weight, x) = plain_batch(2)
    x.requires_grad_(requires_grad)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises((RuntimeError, NotImplementedError)):
            fixed_point(f, z0, (weight, dual), adjoint=adjoint, solver=solver)


def test_the_report() -> None:
    weight, x = inputs()
    solution = solve(weight, x, Implicit(tolerance=1e-8))
    assert isinstance(solution.adjoint, AdjointReport)
    assert solution.adjoint.solution is None
    assert solution.adjoint.solves == 0
    loss = solution.value.sum()
    loss.backward(retain_graph=True)
    report = solution.adjoint.solution
    assert report is not None
    assert solution.adjoint.solves == 1
    assert report.converged.tolist() == [True] * 3
    assert report.residual.shape == report.evaluations.shape == (3,)
    assert (report.residual <= 1e-8).all()
    assert not report.value.requires_grad
    loss.backward()
    assert solution.adjoint.solves == 2


def test_a_failed_adjoint_solve_is_reported() -> None:
    weight, x = inputs()
    solution = solve(weight, x, Implicit(tolerance=TIGHT, max_steps=1))
    with pytest.warns(
        solvers.SolveWarning, match=r"adjoint solve left samples unconverged: MAX_STEPS 3"
    ):
        solution.value.sum().backward()
    report = solution.adjoint.solution
    assert report is not None
    assert (report.status == solvers.Status.MAX_STEPS).all()
    assert (report.residual > 1e-12).all()
    assert (report.evaluations <= 1).all()
    quiet = solve(weight, x, Implicit(tolerance=TIGHT, max_steps=1, on_failure="ignore"))
    quiet.value.sum().backward()
    loud = solve(weight, x, Implicit(tolerance=TIGHT, max_steps=1, on_failure="raise"))
    with pytest.raises(solvers.SolveError, match="adjoint solve"):
        loud.value.sum().backward()


def saddle(z: Tensor, x: Tensor, signs: Tensor) -> Tensor:
    """An energy with a saddle: its Hessian is ``diag(signs)`` near the stationary point."""
    return 0.5 * (signs * (z - x.tanh()).square()).sum(1)


@pytest.mark.parametrize("linear", [None, solvers.GMRES()])
def test_a_saddle_has_a_gradient_all_the_same(linear: object) -> None:
    """CG meets non-positive curvature there and hands the sample over to MINRES."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    signs = torch.rand(4, 6, generator=generator, dtype=torch.float64) + 0.5
    signs[1:3, ::2] *= -1
    start = x.detach().tanh()
    solution = fixed_point(
        solvers.Descent(saddle), start, (x, signs),
        adjoint=Implicit(linear, tolerance=1e-11),  # type: ignore[arg-type]
        tolerance=1e-12,
    )  # fmt: skip
    assert bool(solution.converged.all())
    cotangent = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(solution.value, x, cotangent)
    torch.testing.assert_close(gradient, cotangent * (1 - start.square()), rtol=1e-9, atol=1e-11)
    report = solution.adjoint.solution
    assert report is not None
    assert bool(report.converged.all())

"""Graphs around a solve, the transforms of torch.func, and what the adjoint solve says about itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import solvers
from cases.solves import plain_batch
from solvers import (
    Adjoint,
    AdjointReport,
    Anderson,
    Broyden,
    Descent,
    Forward,
    Implicit,
    OneStep,
    Phantom,
    Status,
    Unrolled,
    fixed_point,
)

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


CALL: dict[str, Any] = {"tolerance": TIGHT, "max_steps": 200}
KINDS: list[Any] = [Implicit(tolerance=TIGHT), solvers.Phantom(3), solvers.OneStep()]


class Map(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4).double()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.4 * self.linear(z) + x)


class Layer(nn.Module):
    def __init__(self, adjoint: Any) -> None:
        super().__init__()
        self.map, self.adjoint = Map(), adjoint

    def forward(self, x: Tensor) -> Tensor:
        z0 = torch.zeros_like(x)
        return fixed_point(self.map, z0, (x,), adjoint=self.adjoint, **CALL).value


def sample(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.defect("D5")
@pytest.mark.parametrize("adjoint", KINDS, ids=str)
def test_grad_vjp_and_jacrev(adjoint: Any) -> None:
    layer, x = Layer(adjoint), sample(3, 4)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(layer(leaf).pow(2).sum(), leaf)
    close(grad(lambda x: layer(x).pow(2).sum())(x), expected)
    value, pull, *_ = vjp(layer, x)
    close(pull(2 * value)[0], expected)
    close(jacrev(layer)(x), torch.autograd.functional.jacobian(layer, x))


def test_second_derivatives() -> None:
    layer, x = Layer(KINDS[0]), sample(2, 4)

    def loss(x: Tensor) -> Tensor:
        return layer(x).pow(3).sum()

    expected: Any = torch.autograd.functional.hessian(loss, x)
    close(jacrev(jacrev(loss))(x), expected)
    direction = sample(2, 4).flip(0)
    close(
        grad(lambda x: (grad(loss)(x) * direction).sum())(x), (expected * direction).sum((-1, -2))
    )
    with pytest.raises(RuntimeError, match="third derivatives"):
        jacrev(jacrev(jacrev(loss)))(x)


def test_backward_through_a_transform() -> None:
    """The weights are ordinary ones, outside of the transform."""
    layer, x = Layer(KINDS[0]), sample(3, 4)

    def loss(x: Tensor) -> Tensor:
        return layer(x).pow(2).sum()

    grad(loss)(x).square().sum().backward()
    found = [p.grad for p in layer.parameters()]
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    expected = torch.autograd.grad(first.square().sum(), list(layer.parameters()))
    for one, other in zip(found, expected, strict=True):
        close(one, other)


def test_an_energy_with_a_mask_and_a_pytree() -> None:
    weight = Map().linear.weight.detach()

    def value(x: Tensor, mask: Tensor) -> Tensor:
        def energy(z: dict[str, Tensor], x: Tensor) -> Tensor:
            pull = (z["a"] - x).square() + (0.3 * (z["a"] @ weight)).cosh()
            return pull.flatten(1).sum(1) + (z["b"] - x.sum((1, 2))[:, None]).square().sum(1)

        start = {"b": torch.zeros_like(x[:, 0, :2]), "a": torch.zeros_like(x)}
        solution = fixed_point(Descent(energy, 0.3), start, (x,), mask=mask, **CALL)
        return solution.value["a"].pow(2).sum() + solution.value["b"].sum()

    x, mask = sample(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(value(leaf, mask), leaf)
    close(grad(value)(x, mask), expected)
    many = torch.stack([x, 2 * x])
    each = vmap(grad(value), in_dims=(0, None))(many, mask)
    close(each, torch.stack([grad(value)(part, mask) for part in many]))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_is_not_possible_is_said() -> None:
    x, unrolled, implicit = sample(2, 4), Layer(Unrolled()), Layer(KINDS[0])
    with pytest.raises(
        RuntimeError, match=r"torch.func's transforms .* needs solver=solvers.Forward"
    ):
        grad(lambda x: unrolled(x).sum())(x)
    plain, call = Map(), {"adjoint": Unrolled(), "solver": Broyden()}
    with pytest.raises(RuntimeError, match=r"got solver=Broyden"):
        grad(lambda x: fixed_point(plain, x, (x,), **call).value.sum())(x)
    call["solver"] = Forward()
    with pytest.raises(RuntimeError, match=r"needs adjoint=Implicit\(\).* without callback"):
        grad(lambda x: fixed_point(plain, x, (x,), callback=print, **call).value.sum())(x)
    call["adjoint"] = Unrolled(checkpoint=True)
    with pytest.raises(RuntimeError, match="checkpoint=False"):
        grad(lambda x: fixed_point(plain, x, (x,), **call).value.sum())(x)
    with pytest.raises(NotImplementedError, match=r"forward-mode .* jacrev"):
        hessian(lambda x: implicit(x).sum())(x)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("solver", [Forward(0.8), Anderson(memory=2)], ids=str)
def test_an_unrolled_loop_is_that_outside(solver: Any) -> None:
    """Values and gradients of the same evaluations, as no sample moves when it has converged."""
    plain, x = Map(), sample(3, 4)
    call: dict[str, Any] = {"adjoint": Unrolled(), "solver": solver, "max_steps": 40}
    call |= {"tolerance": 1e-5, "on_failure": "ignore"}

    def value(x: Tensor) -> Tensor:
        return fixed_point(plain, torch.zeros_like(x), (x,), **call).value

    expected = torch.autograd.functional.jacobian(value, x)
    close(vmap(lambda row: value(row[None])[0])(x), value(x))
    close(jacrev(value)(x), expected)
    close(jacfwd(value)(x), expected)
    close(jvp(value, (x,), (2 * x,))[1], torch.einsum("abij,ij->ab", expected, 2 * x))
    second = hessian(lambda row: value(row[None]).square().sum())(x[0])
    close(second, torch.autograd.functional.hessian(lambda r: value(r[None]).square().sum(), x[0]))

    def counts(row: Tensor) -> tuple[Tensor, ...]:
        found = fixed_point(plain, torch.zeros_like(row)[None], (row[None],), **call)
        return found.status[0], found.evaluations[0], found.residual[0]

    outside = fixed_point(plain, torch.zeros_like(x), (x,), **call)
    status, evaluations, residual = vmap(counts)(x)
    assert torch.equal(status, outside.status) and (status == Status.CONVERGED).all()
    assert torch.equal(evaluations, outside.evaluations) and evaluations.max() < 40
    close(residual, outside.residual)
    call["max_steps"] = 3
    short = fixed_point(plain, torch.zeros_like(x), (x,), states_at=(1, 2), **call)
    status, evaluations, residual = vmap(counts)(x)
    assert torch.equal(status, short.status) and (status == Status.MAX_STEPS).all()
    close(vmap(lambda row: value(row[None])[0])(x), short.value)

    def states(row: Tensor) -> Tensor:
        z0 = torch.zeros_like(row)[None]
        return torch.cat(fixed_point(plain, z0, (row[None],), states_at=(1, 2), **call).states)

    close(vmap(states)(x).transpose(0, 1), torch.stack(short.states))

"""Derivatives through a fixed point: first and second, against finite differences and dense algebra."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import solvers
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
    OneStep,
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


@pytest.mark.parametrize("linear", [None, CG(), MINRES(), GMRES()])
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


TIGHT_SOURCE = Tolerance(rtol=1e-12)
EXACT: list[Adjoint] = [Implicit(tolerance=1e-12, max_steps=200), Unrolled()]
Make = Callable[[Tensor, Tensor], tuple[Callable[..., Tensor], tuple[Any, ...]]]


def leaves(dim: int = 4) -> tuple[Tensor, Tensor]:
    """A shared weight of norm 0.7 and a batch of inputs."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    weight = 0.7 * weight / torch.linalg.matrix_norm(weight, 2)
    x = torch.randn(3, dim, generator=generator, dtype=torch.float64)
    return weight.requires_grad_(), x.requires_grad_()


class Multiply(torch.autograd.Function):
    """``z w^T`` as a custom function, twice differentiable."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(z, weight)
        return z @ weight.mT

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        (cotangent,) = grad_outputs
        z, weight = ctx.saved_tensors
        return cotangent @ weight, cotangent.mT @ z


def through_args(weight: Tensor, x: Tensor) -> Any:
    wide = weight.expand(3, -1, -1)
    return (lambda z, w, x: torch.tanh(torch.einsum("bij,bj->bi", w, z) + x)), (wide, x)


def through_a_closure(weight: Tensor, x: Tensor) -> Any:
    return (lambda z, x: torch.tanh(z @ weight.mT + x)), (x,)


def through_a_captured_result(weight: Tensor, x: Tensor) -> Any:
    half = (2 * weight).mT  # not a leaf, made before the solve
    return (lambda z, x: torch.tanh(0.5 * (z @ half) + x)), (x,)


def through_properties_and_views(weight: Tensor, x: Tensor) -> Any:
    return (lambda z, x: torch.tanh((weight.T.T[:, None].squeeze(1) @ z.T).T + x)), (x,)


def through_keywords_and_lists(weight: Tensor, x: Tensor) -> Any:
    def f(z: Tensor, x: Tensor) -> Tensor:
        stacked = torch.stack([weight, torch.zeros_like(weight)]).sum(0)
        return torch.tanh(nn.functional.linear(z, weight=stacked) + x)

    return f, (x,)


def through_a_custom_function(weight: Tensor, x: Tensor) -> Any:
    return (lambda z, x: torch.tanh(Multiply.apply(z, weight) + x)), (x,)


def through_nested_args(weight: Tensor, x: Tensor) -> Any:
    def f(z: Tensor, inputs: dict[str, Any]) -> Tensor:
        return torch.tanh(z @ weight.mT + inputs["list"][0] + inputs["zero"])

    return f, ({"list": [x], "zero": torch.zeros_like(x), "none": None},)


MAKES: list[Make] = [
    through_args, through_a_closure, through_a_captured_result, through_properties_and_views,
    through_keywords_and_lists, through_a_custom_function, through_nested_args,
]  # fmt: skip


def gradients(make: Make, adjoint: Adjoint, order: int) -> tuple[Tensor, ...]:
    """Gradient of a loss, or of the squared norm of its gradient, in weight and x."""
    weight, x = leaves()
    f, args = make(weight, x)
    solution = fixed_point(
        f, torch.zeros_like(x), args, tolerance=TIGHT_SOURCE, max_steps=100, adjoint=adjoint
    )
    first = torch.autograd.grad(solution.value.pow(3).sum(), (weight, x), create_graph=order == 2)
    if order == 1:
        return first
    return torch.autograd.grad(sum((g * g).sum() for g in first), (weight, x))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("adjoint", EXACT)
@pytest.mark.parametrize("order", [1, 2])
def test_every_way_in_gives_the_same_derivatives(make: Make, adjoint: Adjoint, order: int) -> None:
    reference = gradients(through_args, EXACT[0], order)
    for mine, expected in zip(gradients(make, adjoint, order), reference, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-7, atol=1e-9)


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim, dtype=torch.float64)
        with torch.no_grad():
            self.linear.weight.mul_(0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(z) + x)


def layer_and_input() -> tuple[Layer, Tensor]:
    torch.manual_seed(0)
    return Layer(4), torch.randn(3, 4, dtype=torch.float64)


def run(layer: nn.Module, x: Tensor, adjoint: Adjoint) -> Tensor:
    return fixed_point(
        layer, torch.zeros_like(x), (x,), tolerance=TIGHT_SOURCE, max_steps=100, adjoint=adjoint
    ).value


def test_frozen_parameters_get_nothing_and_cost_nothing() -> None:
    layer, x = layer_and_input()
    layer.requires_grad_(False)
    assert not run(layer, x, Implicit()).requires_grad
    layer.linear.bias.requires_grad_()
    run(layer, x, Implicit()).sum().backward()
    assert layer.linear.weight.grad is None
    assert layer.linear.bias.grad is not None


def test_no_grad_gives_no_graph() -> None:
    layer, x = layer_and_input()
    with torch.no_grad():
        assert not run(layer, x, Implicit()).requires_grad
    with torch.inference_mode():
        assert not run(layer, x, Implicit()).requires_grad
    value = fixed_point(layer, torch.zeros_like(x), (x,), adjoint=None).value
    assert not value.requires_grad


def through_a_gradient_inside(weight: Tensor, x: Tensor) -> Any:
    """``f = z - dE/dz`` written by hand, with a leaf of its own, as users do."""

    def f(z: Tensor, x: Tensor) -> Tensor:
        with torch.enable_grad():
            own = z.detach().requires_grad_()
            energy = (own @ weight.mT).cosh().log().sum() - (x * own).sum()
            (gradient,) = torch.autograd.grad(energy, own, create_graph=True)
        return -0.2 * gradient + 0.5 * x

    return f, (x,)


@pytest.mark.parametrize("adjoint", [Implicit(tolerance=TIGHT_SOURCE), OneStep(), Phantom(2)])
def test_a_leaf_made_by_f_is_not_taken_for_an_outer_tensor(adjoint: Adjoint) -> None:
    """Its graph ends at that leaf, so f does not depend on z here: one step is exact."""
    weight, x = leaves()
    f, args = through_a_gradient_inside(weight, x)
    solution = fixed_point(f, torch.zeros_like(x), args, tolerance=TIGHT_SOURCE, adjoint=adjoint,
                           max_steps=100)  # fmt: skip
    mine = torch.autograd.grad(solution.value.pow(2).sum(), (weight, x))
    once = f(solution.value.detach(), x)
    expected = torch.autograd.grad(once.pow(2).sum(), (weight, x))
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


WEIGHT = 0.3 * torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def step(z: Tensor, x: Tensor) -> Tensor:
    """Samples with larger x take fewer evaluations."""
    return torch.tanh(z @ WEIGHT) + x


def energy_states(z: Tensor, x: Tensor) -> Tensor:
    return (0.5 * z.square() - (z + x).tanh() @ WEIGHT.square() * 0.3 - 0.1 * x * z).sum(1)


def sample(batch: int = 5) -> Tensor:
    drawn = torch.randn(batch, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return drawn * torch.logspace(1, -2, batch, dtype=torch.float64)[:, None]


def solve(f: Any = step, x: Tensor | None = None, **options: Any) -> solvers.Solution:
    x = sample() if x is None else x
    given: dict[str, Any] = {"tolerance": 1e-8, "max_steps": 30, "adjoint": None}
    given |= {"on_failure": "ignore"} | options
    return fixed_point(f, torch.zeros_like(x), (x,), **given)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(("f", "solver"), [
    (step, None),
    (step, Forward(0.7)),
    (step, Broyden()),
    (Descent(energy_states), None),
    (Descent(energy_states), solvers.LBFGS()),
    (Descent(energy_states), Anderson(memory=3)),
], ids=["map", "map-Forward", "map-Broyden", "energy", "energy-LBFGS", "energy-Anderson"])  # fmt: skip
def test_a_state_is_what_the_smaller_budget_returns(f: Any, solver: Any, compact: bool) -> None:
    x = torch.cat([sample(20), 0 * sample(2)])
    at = [1, 5, 6, 30]
    whole = solve(f, x, solver=solver, compact=compact, states_at=at)
    assert len(whole.states) == len(at)
    for number, state in zip(at, whole.states, strict=True):
        # Recorded, so that the loop solves it, too: the engine rounds differently.
        part = solve(f, x, solver=solver, compact=compact, max_steps=number, record=True)
        assert torch.equal(state, part.value)
    assert int(whole.evaluations.min()) < 6 < int(whole.evaluations.max())


def test_second_attempts_count_on() -> None:
    """The default solver gives these samples up, and plain steps go on from where it was."""

    def kinked(z: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
        return (z - torch.einsum("bij,bj->bi", matrix, z) + target).clamp(-0.3, 0.3)

    drawn = torch.randn(64, 8, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    basis = torch.linalg.qr(drawn[..., :8]).Q
    args = ((basis * torch.logspace(0, -3, 8)) @ basis.mT, drawn[..., 8])
    z0 = torch.zeros_like(drawn[..., 8])
    options: dict[str, Any] = {"adjoint": None, "tolerance": 1e-5}
    options |= {"on_failure": "ignore"}
    at = [20, 103, 400]
    whole = fixed_point(kinked, z0, args, max_steps=400, states_at=at, **options)
    first = fixed_point(kinked, z0, args, max_steps=400, solver=Anderson(), **options)
    assert not bool(first.converged.all()) and bool(whole.converged.all())
    assert (whole.evaluations > first.evaluations).any()
    moved = [(z - whole.value).norm(dim=1) for z in whole.states]
    assert moved[0].any() and moved[1].any() and not moved[2].any()


def tree_step(z: Any, x: Any) -> Any:
    return {"a": step(z["a"], x), "b": (0.3 * z["a"] + 0.2 * z["b"]).sin()}


def test_structure_and_memory() -> None:
    x = sample(3)
    z0 = {"a": torch.zeros_like(x), "b": torch.ones_like(x)}
    found = fixed_point(tree_step, z0, (x,), states_at=[1, 3, 4], adjoint=None)
    assert torch.equal(found.states[0]["b"], z0["b"])
    found.states[0]["b"].zero_()
    found.states[2]["a"].zero_()
    assert float(z0["b"].min()) == 1 and float(found.value["a"].abs().max()) > 0


@pytest.mark.parametrize("checkpoint", [False, True])
def test_unrolled_states_have_exact_gradients(checkpoint: bool) -> None:
    def states(x: Tensor) -> tuple[Tensor, ...]:
        adjoint, solver = Unrolled(checkpoint), Anderson(memory=2)
        found = solve(x=x, adjoint=adjoint, solver=solver, states_at=[1, 2, 5], max_steps=6)
        return (*found.states, found.value)

    x = (0.5 * torch.ones(1, 6, dtype=torch.float64) + 0.1 * sample(1)).requires_grad_()
    assert torch.autograd.gradcheck(states, (x,), atol=1e-6)


@pytest.mark.parametrize(("adjoint", "number", "damping"), [
    (Phantom(3, 0.7), 3, 0.7),
    (solvers.OneStep(), 1, 1.0),
    (Implicit(), 1, 1.0),
    (Implicit(states=Phantom(2)), 2, 1.0),
], ids=str)  # fmt: skip
def test_the_others_iterate_from_the_state(adjoint: Any, number: int, damping: float) -> None:
    x = sample().requires_grad_()
    found = solve(x=x, adjoint=adjoint, states_at=[2, 6])
    plain = solve(x=x.detach(), states_at=[2, 6])
    for state, expected in zip(found.states, plain.states, strict=True):
        assert torch.equal(state, expected)
        z = expected
        for _ in range(number):
            z = (1 - damping) * z + damping * step(z, x)
        wanted = torch.autograd.grad(z.pow(3).sum(), x, grad_outputs=None, retain_graph=True)[0]
        cotangent = 3 * z.detach().square()  # of the iterations' end, to be asked of the state
        (gradient,) = torch.autograd.grad(state, x, cotangent, retain_graph=True)
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("states_at", "error", "match"), [
    ([0], ValueError, r"states_at\[0\] must be >= 1"),
    ([2, 2], ValueError, r"states_at must increase, got \[2, 2\]"),
    ([2, 31], ValueError, "states_at must be at most max_steps=30"),
    ([2.0], TypeError, r"states_at\[0\] must be an integer"),
    (5, TypeError, "states_at must be a sequence of integers, got 5"),
    ("5", TypeError, "states_at must be a sequence"),
])  # fmt: skip
def test_wrong_numbers(states_at: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        solve(states_at=states_at)


def test_what_cannot_have_states_says_so() -> None:
    with pytest.raises(TypeError, match=r"states must be solvers.Phantom.* got Unrolled"):
        Implicit(states=Unrolled())  # type: ignore[arg-type]

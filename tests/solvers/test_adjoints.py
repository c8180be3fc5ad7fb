"""Derivatives through a fixed point: of every way in, by torch.func too; right or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.utils import parametrizations

import solvers
from cases.solves import plain_batch, tanh_layer
from solvers import (
    CG,
    GMRES,
    LBFGS,
    MINRES,
    Adjoint,
    AdjointReport,
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
    Status,
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
    torch.testing.assert_close(gradients(make, adjoint, order), reference, rtol=1e-7, atol=1e-9)


class Map(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4).double()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.4 * self.linear(z) + x)


class Layer(nn.Module):
    """The fixed points of ``inner``."""

    def __init__(self, inner: Any, **options: Any) -> None:
        super().__init__()
        self.inner, self.options = inner, {"tolerance": TIGHT_SOURCE, "max_steps": 200} | options

    def forward(self, x: Tensor) -> Tensor:
        return fixed_point(self.inner, torch.zeros_like(x), (x,), **self.options).value


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_frozen_parameters_get_nothing_and_cost_nothing() -> None:
    layer, x = Layer(Map(), adjoint=Implicit()), normal(3, 4)
    layer.requires_grad_(False)
    assert not layer(x).requires_grad
    layer.inner.linear.bias.requires_grad_()
    layer(x).sum().backward()
    assert layer.inner.linear.weight.grad is None
    assert layer.inner.linear.bias.grad is not None


def test_no_grad_gives_no_graph() -> None:
    layer, x = Layer(Map(), adjoint=Implicit()), normal(3, 4)
    with torch.no_grad():
        assert not layer(x).requires_grad
    with torch.inference_mode():
        assert not layer(x).requires_grad
    assert not Layer(Map(), adjoint=None)(x).requires_grad


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
    torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


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


ALL: list[Adjoint] = [*EXACT, Unrolled(True), Phantom(3), OneStep()]


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None].requires_grad_()


@pytest.mark.defect("A2")
@pytest.mark.parametrize("adjoint", [Phantom(5), OneStep()])
def test_the_value_is_the_solution_where_phantom_steps_leave_the_domain(adjoint: Adjoint) -> None:
    w = leaf(1.0, 1.0)
    z0 = torch.tensor([[0.9], [1.2]], dtype=torch.float64)

    def solve(adjoint: Adjoint | None) -> Any:
        return fixed_point(
            lambda z, w: (3 * z - 2 * w).sqrt(), z0, (w,), tolerance=0.1,
            adjoint=adjoint,
        )  # fmt: skip

    found, expected = solve(adjoint), solve(None)
    assert torch.equal(found.value, expected.value)
    assert bool(found.converged.all())


@pytest.mark.parametrize("target", ["b", "w", "captured", "weight"])
def test_a_double_backward_uses_the_values_of_the_forward_pass_or_raises(target: str) -> None:
    w, b = leaf(0.3, 0.5), leaf(0.2, -0.4).detach()
    captured = torch.tensor(0.7, dtype=torch.float64)
    weight = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    tensors = {"b": b, "w": w, "captured": captured, "weight": weight}

    def f(z: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(0.5 * w * z * b * captured) + w.square() * b * weight

    def second(change: str | None) -> Tensor:
        value = fixed_point(
            f,
            torch.zeros_like(w),
            (w, b),
            adjoint=Implicit(tolerance=TIGHT_SOURCE),
            tolerance=TIGHT_SOURCE,
        ).value
        (first,) = torch.autograd.grad(value.sum(), w, create_graph=True)
        if change is not None:
            with torch.no_grad():
                tensors[change].mul_(1.5)
        return torch.autograd.grad(first.square().sum(), w)[0]

    assert second(None).isfinite().all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second(target)


@pytest.mark.defect("A5")
def test_a_double_backward_does_not_see_what_autograd_did_not_save() -> None:
    """The graph of ``tanh(a + b)`` needs its value alone; f must not be evaluated at another b."""
    w, b = leaf(0.3, 0.5), leaf(0.2, -0.4).detach()

    def second(change: float) -> Tensor:
        value = fixed_point(
            lambda z, w, b: torch.tanh(0.5 * w * z + b), torch.zeros_like(w), (w, b),
            adjoint=Implicit(tolerance=TIGHT_SOURCE), tolerance=TIGHT_SOURCE,
        ).value  # fmt: skip
        (first,) = torch.autograd.grad(value.sum(), w, create_graph=True)
        b.add_(change)
        return torch.autograd.grad(first.square().sum(), w)[0]

    expected = second(0.0)
    torch.testing.assert_close(second(3.0), expected)


class Model(nn.Module):
    """A map with a parametrised weight and buffers."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = parametrizations.weight_norm(nn.Linear(3, 3).double())
        self.register_buffer("shift", torch.ones(3, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.calls += 1  # what f changes itself is its own affair
        return 0.4 * torch.tanh(self.linear(z) + x * self.shift)


def unrolled_loss(model: Model, x: Tensor, **options: Any) -> Tensor:
    adjoint = Unrolled(**options)
    return fixed_point(model, torch.zeros_like(x), (x,), adjoint=adjoint).value.pow(2).sum()


@pytest.mark.defect("C1")
def test_checkpoints_of_parametrised_weights_give_the_unrolled_gradient() -> None:
    model, x = Model(), normal(4, 3).requires_grad_()
    drawn = [*model.parameters(), x]
    expected = torch.autograd.grad(unrolled_loss(model, x), drawn, create_graph=True)
    found = torch.autograd.grad(unrolled_loss(model, x, checkpoint=True), drawn, create_graph=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    seconds = [torch.autograd.grad(g[-1].square().sum(), drawn) for g in (found, expected)]
    torch.testing.assert_close(*seconds, rtol=1e-10, atol=1e-13)


@pytest.mark.defect("A6")
@pytest.mark.parametrize("name", ["linear.bias", "original0", "shift", "x", "x without gradient"])
def test_checkpoints_raise_where_what_f_reads_has_changed(name: str) -> None:
    model, x = Model(), normal(4, 3).requires_grad_(name != "x without gradient")
    tensors = {
        "linear.bias": model.linear.bias,
        "original0": model.linear.parametrizations["weight"].original0,  # type: ignore[index]
        "shift": model.shift,
    }
    loss = unrolled_loss(model, x, checkpoint=True)
    with torch.no_grad():
        tensors.get(name, x).add_(0.1)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        loss.backward()


def logarithm(weight: Tensor, calls: list[int] | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """``w log x + 0.1 z + w``, NaN where x is negative, whatever z."""

    def f(z: Tensor, x: Tensor) -> Tensor:
        if calls is not None:
            calls.append(z.shape[0])
        return weight * x.log() + 0.1 * z + weight

    return f


@pytest.mark.defect("D2")
@pytest.mark.parametrize("adjoint", ALL)
def test_samples_without_a_finite_evaluation_have_a_gradient_of_zero(adjoint: Adjoint) -> None:
    """All of them, as each of them in a batch with others."""
    for values in ((-1.0, -2.0), (-1.0, 2.0)):
        weight, x = torch.tensor([0.5], dtype=torch.float64, requires_grad=True), leaf(*values)
        z0 = torch.ones_like(x).requires_grad_()
        solution = fixed_point(logarithm(weight), z0, (x,), adjoint=adjoint, on_failure="ignore")
        assert solution.status[0] == Status.NONFINITE
        grads = torch.autograd.grad(solution.value.sum(), (weight, x), allow_unused=False)
        assert grads[1][0] == 0
        assert bool(grads[0].isfinite().all())
        assert bool(grads[0].any()) == (values[1] > 0)


@pytest.mark.defect("D3")
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("solver", [solvers.Anderson(), solvers.Forward()])
def test_an_unrolled_solve_with_a_failed_sample_is_not_repeated(
    checkpoint: bool, solver: Any
) -> None:
    """Its first evaluation is, without the sample; the others' gradients are those without it."""

    def run(x: Tensor, calls: list[int]) -> tuple[Any, Tensor]:
        weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        solution = fixed_point(
            logarithm(weight, calls), torch.ones_like(x), (x,), solver=solver,
            adjoint=Unrolled(checkpoint=checkpoint), on_failure="ignore", record=True,
            verify=False,
        )  # fmt: skip
        number = len(calls)
        (gradient,) = torch.autograd.grad(solution.value.sum(), weight)
        del calls[number:]
        return solution, gradient

    count: list[int] = []
    alone: list[int] = []
    solution, gradient = run(torch.tensor([[1.0], [-1.0], [2.0]]).double(), count)
    expected, other = run(torch.tensor([[1.0], [2.0]]).double(), alone)
    assert len(count) == len(alone) + 1
    torch.testing.assert_close(gradient, other)
    assert solution.status.tolist() == [0, int(Status.NONFINITE), 0]
    assert torch.equal(solution.value[[0, 2]], expected.value)
    assert torch.equal(solution.evaluations[[0, 2]], expected.evaluations)
    assert solution.value[1] == 1
    assert solution.trace is not None and solution.trace.residual.shape[0] == 3


@pytest.mark.defect("C2")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_newton_on_a_piecewise_constant_map(requires_grad: bool) -> None:
    """Where autograd knows the derivative, zero, Newton's step is the plain one; else it says so."""
    b = torch.full((2, 3), 0.4, requires_grad=requires_grad)
    z0 = torch.full((2, 3), 0.3)
    solution = fixed_point(lambda z, b: (z + b).round(), z0, (b,), solver=Newton())
    assert bool(solution.converged.all())
    if requires_grad:
        (gradient,) = torch.autograd.grad(solution.value.sum(), b)
        assert not bool(gradient.any())
    with pytest.raises(RuntimeError, match=r"not differentiable in z .* such as Anderson"):
        fixed_point(lambda z, b: (z > b).to(z.dtype), z0, (b,), solver=Newton())


@pytest.mark.defect("C2")
@pytest.mark.parametrize("kind", ["compared", "constant"])
def test_an_energy_without_gradient_is_refused(kind: str) -> None:
    x = torch.full((2, 3), 0.4)
    w = torch.ones((), requires_grad=True)
    energies = {
        "compared": lambda z, x: (z > x).to(z.dtype).sum(1),
        "constant": lambda z, x: w * x.sum(1),
    }
    for solver in (None, Newton()):
        with pytest.raises(ValueError, match="energy must depend on z"):
            fixed_point(solvers.Descent(energies[kind]), x, (x,), solver=solver)


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


class Scaled(nn.Module):
    """``0.5 tanh(z w + x c)``."""

    c: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.9, 0.3, -0.5], dtype=torch.float64))
        self.register_buffer("c", torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64))
        self.cache: Tensor | None = None

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        if self.cache is None:  # a table made at the first call, and kept
            self.cache = torch.ones(3, dtype=z.dtype)
        return 0.5 * torch.tanh(z * self.w * self.cache + x * self.c)


@pytest.mark.defect("A6")
@pytest.mark.parametrize("how", ["functional_call", "replaced"])
def test_checkpoints_raise_where_f_reads_other_tensors_than_before(how: str) -> None:
    model, x = Layer(Scaled(), adjoint=Unrolled(checkpoint=True)), normal(4, 3).requires_grad_()
    other = nn.Parameter(0.5 * model.inner.w.detach())
    if how == "functional_call":
        loss = functional_call(model, {"inner.w": other}, x).sum()
    else:
        loss = model(x).sum()
        model.inner.w = other
    with pytest.raises(RuntimeError, match="did not read in the forward pass"):
        loss.backward()


def half_lost(weight: Tensor, x: Tensor, **options: Any) -> solvers.Solution:
    """Two samples: ``z = w z / 2 + x``; and a step of an energy without bound, ``z - dE = 3 w z + x``."""
    factor = torch.tensor([[0.5], [3.0]], dtype=torch.float64)
    return fixed_point(
        lambda z, x, factor: factor * weight * z + x, torch.zeros_like(x), (x, factor),
        solver=Forward(), tolerance=TIGHT_SOURCE, on_failure="ignore", max_steps=200, **options,
    )  # fmt: skip


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("adjoint", [Implicit(tolerance=TIGHT_SOURCE), Phantom(60), OneStep()])
@pytest.mark.parametrize("transformed", [False, True])
def test_a_sample_that_diverged_has_a_gradient_of_zero(
    adjoint: Adjoint, compact: bool, transformed: bool
) -> None:
    """Its best iterate is no solution, also where the adjoint system there has one."""
    weight = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    options = {"adjoint": adjoint, "compact": compact}
    solution = half_lost(weight, x, **options)
    assert solution.status.tolist() == [Status.CONVERGED, Status.DIVERGED]
    if transformed:

        def total(weight: Tensor, x: Tensor) -> Tensor:
            return half_lost(weight, x, **options).value.sum()

        by_weight, by_input = grad(total, argnums=(0, 1))(weight.detach(), x.detach())
    else:
        by_weight, by_input = torch.autograd.grad(solution.value.sum(), (weight, x))
    assert not bool(by_input[1].any())
    # z = x / (1 - w / 2) of the first sample; one evaluation knows df/dx = 1 and df/dw = z / 2 alone.
    slope, product = (1.0, 1.0) if isinstance(adjoint, OneStep) else (2.0, 2.0)
    torch.testing.assert_close(by_input[0], torch.full_like(x[0], slope))
    torch.testing.assert_close(by_weight.item(), 3 * product)


@pytest.mark.defect("D5")
def test_vmap_of_a_map_that_knows_the_batch() -> None:
    c, starts = normal(4, 3), torch.stack([normal(4, 3), normal(4, 3) * 2, normal(4, 3) * 3])

    def solve(q: Tensor) -> Tensor:
        return fixed_point(lambda z: 0.5 * z + c, q, compact=False, tolerance=TIGHT_SOURCE).value

    torch.testing.assert_close(vmap(solve)(starts), (2 * c).expand_as(starts))


@pytest.mark.defect("A8")
@pytest.mark.parametrize("adjoint", ALL)
def test_the_output_may_be_changed_in_place(adjoint: Adjoint) -> None:
    model, x = Layer(Scaled(), adjoint=adjoint), normal(4, 3).requires_grad_()
    expected = torch.autograd.grad((model(x) + 1).pow(2).sum(), [x, *model.parameters()])
    value = model(x)
    value.add_(1)
    found = torch.autograd.grad(value.pow(2).sum(), [x, *model.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.defect("D2")
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_start_that_is_the_solution_has_a_gradient_of_zero(checkpoint: bool) -> None:
    """No step depends on the weight; the backward pass must run all the same."""
    weight = torch.tensor(0.5, requires_grad=True)
    solution = fixed_point(
        lambda z: weight * z, torch.zeros(2, 3), adjoint=Unrolled(checkpoint=checkpoint)
    )
    assert solution.converged.all()
    solution.value.sum().backward()
    assert weight.grad == 0


def solve_layer(weight: Tensor, x: Tensor, adjoint: Adjoint) -> solvers.Solution:
    f, _, _ = plain_batch(1)
    return fixed_point(
        f, torch.zeros_like(x), (weight, x), tolerance=TIGHT_SOURCE, max_steps=100, adjoint=adjoint
    )


@pytest.mark.parametrize("adjoint", ALL)
def test_backward_twice(adjoint: Adjoint) -> None:
    weight, x = layer_inputs(3, 4)
    loss = solve_layer(weight, x, adjoint).value.square().sum()
    first = torch.autograd.grad(loss, (weight, x), retain_graph=True)
    second = torch.autograd.grad(loss, (weight, x))
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (weight, x))


@pytest.mark.parametrize("adjoint", EXACT)
def test_a_solve_inside_f(adjoint: Adjoint) -> None:
    """Bilevel: the map of the outer solve is itself a solve; exact where both are."""
    weight, x = layer_inputs(3, 4)

    def outer(z: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return 0.5 * solve_layer(weight, x + 0.3 * z, adjoint).value

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
    _, x = layer_inputs(3, 4)
    weight = layer_inputs(3, 4)[0].detach()
    value = solve_layer(weight, x, adjoint).value.sum()
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return torch.autograd.grad(second.sum(), x)[0]


def test_third_derivatives_raise_or_are_right() -> None:
    with pytest.raises(RuntimeError, match=r"third derivatives .* use adjoint=Unrolled"):
        third(Implicit(tolerance=TIGHT_SOURCE))
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
    weight, x = layer_inputs(3, 4)
    solution = solve_layer(weight, x, Implicit(tolerance=1e-8))
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
    weight, x = layer_inputs(3, 4)
    solution = solve_layer(weight, x, Implicit(tolerance=TIGHT_SOURCE, max_steps=1))
    with pytest.warns(
        solvers.SolveWarning, match=r"adjoint solve left samples unconverged: MAX_STEPS 3"
    ):
        solution.value.sum().backward()
    report = solution.adjoint.solution
    assert report is not None
    assert (report.status == solvers.Status.MAX_STEPS).all()
    assert (report.residual > 1e-12).all()
    assert (report.evaluations <= 1).all()
    quiet = solve_layer(
        weight, x, Implicit(tolerance=TIGHT_SOURCE, max_steps=1, on_failure="ignore")
    )
    quiet.value.sum().backward()
    loud = solve_layer(weight, x, Implicit(tolerance=TIGHT_SOURCE, max_steps=1, on_failure="raise"))
    with pytest.raises(solvers.SolveError, match="adjoint solve"):
        loud.value.sum().backward()


@pytest.mark.parametrize("linear", [None, GMRES(restart=80)])
def test_a_saddle_has_a_gradient_all_the_same(linear: LinearSolver | None) -> None:
    """CG meets non-positive curvature in one sample and hands it over to MINRES, within the budget."""
    generator, size = torch.Generator().manual_seed(0), 40
    basis = torch.linalg.qr(torch.randn(3, size, size, generator=generator).double())[0]
    eigenvalues = torch.linspace(0.3, 30, size).double().repeat(3, 1)
    eigenvalues[1, 5] = -2.0
    hessian = basis @ torch.diag_embed(eigenvalues) @ basis.mT
    x = torch.randn(3, size, generator=generator).double().requires_grad_()

    def energy(z: Tensor, hessian: Tensor, x: Tensor) -> Tensor:
        return 0.5 * (z * (hessian @ z[:, :, None])[:, :, 0]).sum(1) - (x * z).sum(1)

    start = torch.linalg.solve(hessian, x.detach())
    expected = torch.linalg.solve(hessian, torch.ones_like(start))
    for budget in (10, 25, 400):
        adjoint = Implicit(linear, tolerance=1e-10, max_steps=budget, on_failure="ignore")
        solution = fixed_point(Descent(energy), start, (hessian, x), adjoint=adjoint)
        (gradient,) = torch.autograd.grad(solution.value.sum(), x)
        report = solution.adjoint.solution
        assert report is not None and (report.evaluations <= budget).all()
    assert report is not None and report.converged.all()
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


CALL: dict[str, Any] = {"tolerance": TIGHT_SOURCE, "max_steps": 200}
KINDS: list[Any] = [Implicit(tolerance=TIGHT_SOURCE), solvers.Phantom(3), solvers.OneStep()]


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.defect("D5")
@pytest.mark.parametrize("adjoint", KINDS, ids=str)
def test_grad_vjp_and_jacrev(adjoint: Any) -> None:
    layer, x = Layer(Map(), adjoint=adjoint), normal(3, 4)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(layer(leaf).pow(2).sum(), leaf)
    close(grad(lambda x: layer(x).pow(2).sum())(x), expected)
    value, pull, *_ = vjp(layer, x)
    close(pull(2 * value)[0], expected)
    close(jacrev(layer)(x), torch.autograd.functional.jacobian(layer, x))


def test_second_derivatives() -> None:
    layer, x = Layer(Map(), adjoint=KINDS[0]), normal(2, 4)

    def loss(x: Tensor) -> Tensor:
        return layer(x).pow(3).sum()

    expected: Any = torch.autograd.functional.hessian(loss, x)
    close(jacrev(jacrev(loss))(x), expected)
    direction = normal(2, 4).flip(0)
    close(
        grad(lambda x: (grad(loss)(x) * direction).sum())(x), (expected * direction).sum((-1, -2))
    )
    with pytest.raises(RuntimeError, match="third derivatives"):
        jacrev(jacrev(jacrev(loss)))(x)


def test_backward_through_a_transform() -> None:
    """The weights are ordinary ones, outside of the transform."""
    layer, x = Layer(Map(), adjoint=KINDS[0]), normal(3, 4)

    def loss(x: Tensor) -> Tensor:
        return layer(x).pow(2).sum()

    grad(loss)(x).square().sum().backward()
    found = [p.grad for p in layer.parameters()]
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    expected = torch.autograd.grad(first.square().sum(), list(layer.parameters()))
    close(found, expected)


def test_an_energy_with_a_mask_and_a_pytree() -> None:
    weight = Map().linear.weight.detach()

    def value(x: Tensor, mask: Tensor) -> Tensor:
        def energy(z: dict[str, Tensor], x: Tensor) -> Tensor:
            pull = (z["a"] - x).square() + (0.3 * (z["a"] @ weight)).cosh()
            return pull.flatten(1).sum(1) + (z["b"] - x.sum((1, 2))[:, None]).square().sum(1)

        start = {"b": torch.zeros_like(x[:, 0, :2]), "a": torch.zeros_like(x)}
        solution = fixed_point(Descent(energy, 0.3), start, (x,), mask=mask, **CALL)
        return solution.value["a"].pow(2).sum() + solution.value["b"].sum()

    x, mask = normal(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(value(leaf, mask), leaf)
    close(grad(value)(x, mask), expected)
    many = torch.stack([x, 2 * x])
    each = vmap(grad(value), in_dims=(0, None))(many, mask)
    close(each, torch.stack([grad(value)(part, mask) for part in many]))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_is_not_possible_is_said() -> None:
    x, unrolled, implicit = (
        normal(2, 4),
        Layer(Map(), adjoint=Unrolled()),
        Layer(Map(), adjoint=KINDS[0]),
    )
    with pytest.raises(
        RuntimeError, match=r"torch.func's transforms .* needs solver=solvers.Forward"
    ):
        grad(lambda x: unrolled(x).sum())(x)
    plain, call = Map(), {"adjoint": Unrolled(), "solver": Broyden()}
    with pytest.raises(RuntimeError, match=r"got solver=Broyden"):
        grad(lambda x: fixed_point(plain, x, (x,), **call).value.sum())(x)
    call["solver"] = Forward()
    with pytest.raises(RuntimeError, match=r"adjoint must be Implicit\(\).* without callback"):
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
    plain, x = Map(), normal(3, 4)
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

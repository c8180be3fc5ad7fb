"""Derivatives through a fixed point: of every way in, by torch.func too; right or an error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrizations import spectral_norm

import solvers
from cases.solves import normal, plain_batch, tanh_layer
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


def solve_layer(
    weight: Tensor, x: Tensor, adjoint: Adjoint, solver: Solver | None = None
) -> solvers.Solution:
    return fixed_point(
        tanh_layer, torch.zeros_like(x), (weight, x), solver=solver, tolerance=TIGHT,
        max_steps=200, adjoint=adjoint, on_failure="ignore",
    )  # fmt: skip


def descent_solve(adjoint: Adjoint, solver: Solver, **options: Any) -> Callable[..., Tensor]:
    given: dict[str, Any] = {"tolerance": TIGHT, "max_steps": 300, "on_failure": "ignore"} | options

    def solve(x: Tensor, matrix: Tensor) -> Tensor:
        f, z0 = Descent(energy, 0.5), torch.zeros_like(x)
        return fixed_point(f, z0, (x, matrix), solver=solver, adjoint=adjoint, **given).value

    return solve


@pytest.mark.parametrize("linear", [None, GMRES(), GMRES(restart=2)])
def test_implicit_on_a_map(linear: LinearSolver | None) -> None:
    def solve(weight: Tensor, x: Tensor) -> Tensor:
        return solve_layer(weight, x, exact(linear), Anderson()).value

    assert gradcheck(solve, layer_inputs())
    assert gradgradcheck(solve, layer_inputs(), fast_mode=linear is not None)


@pytest.mark.parametrize("linear", [None, CG(), MINRES(), GMRES()])
def test_implicit_on_an_energy(linear: LinearSolver | None) -> None:
    solve = descent_solve(exact(linear), LBFGS())
    assert gradcheck(solve, descent_inputs())
    if linear is None:
        assert gradgradcheck(solve, descent_inputs(), fast_mode=True)


# A fixed number of steps: the iteration itself is then a smooth function.
UNROLLED: list[tuple[Solver, int]] = [
    (Forward(damping=0.5), 5),
    (Anderson(memory=3, damping=0.7), 6),
    (Broyden(memory=2), 5),
    (GradientDescent(momentum=0.5, nesterov=True), 5),
    (GradientDescent("auto"), 5),
]


@pytest.mark.parametrize(
    ("solver", "steps", "checkpoint"),
    [*((*row, False) for row in UNROLLED), (*UNROLLED[1], True)],
)
def test_unrolled_steps_of_a_map(solver: Solver, steps: int, checkpoint: bool) -> None:
    def solve(weight: Tensor, x: Tensor, z0: Tensor) -> Tensor:
        return fixed_point(
            tanh_layer, z0, (weight, x), solver=solver, tolerance=0.0,
            max_steps=steps, adjoint=Unrolled(checkpoint), on_failure="ignore",
        ).value  # fmt: skip

    weight, x = layer_inputs(dim=4)
    inputs = (weight, x, torch.full_like(x, 0.1).requires_grad_())
    assert gradcheck(solve, inputs)
    assert gradgradcheck(solve, inputs, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize(
    ("solver", "checkpoint"), [(LBFGS(memory=2), False), (GradientDescent("auto"), True)]
)
def test_unrolled_steps_of_an_energy(solver: Solver, checkpoint: bool) -> None:
    solve = descent_solve(Unrolled(checkpoint), solver, tolerance=0.0, max_steps=5)
    assert gradcheck(solve, descent_inputs(), fast_mode=True)
    assert gradgradcheck(solve, descent_inputs(), atol=1e-4, fast_mode=True)


def test_newton_refuses_to_be_unrolled() -> None:
    f, z0, args = plain_batch(2)
    with pytest.raises(RuntimeError, match="Implicit"):
        fixed_point(f, z0, args, solver=Newton(), adjoint=Unrolled())


TIGHT_SOURCE = Tolerance(rtol=1e-12)
EXACT: list[Adjoint] = [Implicit(tolerance=1e-12, max_steps=200), Unrolled()]


def through_args(weight: Tensor, x: Tensor) -> Any:
    wide = weight.expand(3, -1, -1)
    return (lambda z, w, x: torch.tanh(torch.einsum("bij,bj->bi", w, z) + x)), (wide, x)


def through_a_closure(weight: Tensor, x: Tensor) -> Any:
    return (lambda z, x: torch.tanh(z @ weight.mT + x)), (x,)


def through_a_captured_result(weight: Tensor, x: Tensor) -> Any:
    half = (2 * weight).mT  # not a leaf, made before the solve
    return (lambda z, x: torch.tanh(0.5 * (z @ half) + x)), (x,)


def through_nested_args(weight: Tensor, x: Tensor) -> Any:
    def f(z: Tensor, inputs: dict[str, Any]) -> Tensor:
        return torch.tanh(z @ weight.mT + inputs["list"][0] + inputs["zero"])

    return f, ({"list": [x], "zero": torch.zeros_like(x), "none": None},)


def derivatives(make: Any, adjoint: Adjoint) -> list[Tensor]:
    """Gradients of a loss, and of the squared norm of its gradient, in a shared weight and x."""
    weight, x = normal(4, 4) / 5, normal(3, 4)
    inputs = [weight.requires_grad_(), x.requires_grad_()]
    f, args = make(*inputs)
    options: dict[str, Any] = {"tolerance": TIGHT_SOURCE, "max_steps": 100, "adjoint": adjoint}
    loss = fixed_point(f, torch.zeros_like(x), args, **options).value.pow(3).sum()
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    size = torch.stack([each.square().sum() for each in first]).sum()
    return [*first, *torch.autograd.grad(size, inputs)]


@pytest.mark.parametrize(
    "make", [through_a_closure, through_a_captured_result, through_nested_args]
)
@pytest.mark.parametrize("adjoint", EXACT)
def test_derivatives_agree_for_every_way_to_pass_a_tensor(make: Any, adjoint: Adjoint) -> None:
    reference = derivatives(through_args, EXACT[0])
    torch.testing.assert_close(derivatives(make, adjoint), reference, rtol=1e-7, atol=1e-9)


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


@pytest.mark.parametrize(("f", "solver", "compact"), [
    (step, None, True),
    (step, Forward(0.7), False),
    (Descent(energy_states), None, False),
    (Descent(energy_states), Anderson(memory=3), True),
])  # fmt: skip
def test_a_recorded_state_equals_the_value_of_a_shorter_solve(
    f: Any, solver: Any, compact: bool
) -> None:
    x = torch.cat([sample(20), 0 * sample(2)])
    at = [1, 5, 6, 30]
    whole = solve(f, x, solver=solver, compact=compact, states_at=at)
    for number, state in zip(at, whole.states, strict=True):
        # Recorded, so that the loop solves it, too: the engine rounds differently.
        part = solve(f, x, solver=solver, compact=compact, max_steps=number, record=True)
        assert torch.equal(state, part.value)
    assert int(whole.evaluations.min()) < 6 < int(whole.evaluations.max())


@pytest.mark.parametrize(("adjoint", "number", "damping"), [
    (Phantom(3, 0.7), 3, 0.7),
    (OneStep(), 1, 1.0),
    (Implicit(), 1, 1.0),
    (Implicit(states=Phantom(2)), 2, 1.0),
], ids=str)  # fmt: skip
def test_phantom_and_one_step_gradients_iterate_from_the_state(
    adjoint: Any, number: int, damping: float
) -> None:
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


@pytest.mark.defect("A5")
def test_a_double_backward_uses_the_saved_value_of_a_changed_argument() -> None:
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
@pytest.mark.parametrize("name", ["original0", "shift", "x without gradient"])
def test_checkpoints_raise_if_a_tensor_that_f_reads_has_changed(name: str) -> None:
    model, x = Model(), normal(4, 3).requires_grad_(name != "x without gradient")
    tensors = {
        "original0": model.linear.parametrizations["weight"].original0,  # type: ignore[index]
        "shift": model.shift,
    }
    loss = unrolled_loss(model, x, checkpoint=True)
    with torch.no_grad():
        tensors.get(name, x).add_(0.1)
    with pytest.raises(RuntimeError):
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
@pytest.mark.parametrize(("solver", "checkpoint"), [(Anderson(), False), (Forward(), True)])
def test_an_unrolled_solve_with_a_failed_sample_is_not_repeated(
    solver: Solver, checkpoint: bool
) -> None:
    """Its first evaluation is, without the sample; the others' gradients are those without it."""

    def run(*x: float) -> tuple[solvers.Solution, Tensor, int]:
        weight, calls = torch.tensor(0.5, dtype=torch.float64, requires_grad=True), []
        given = torch.tensor(x, dtype=torch.float64)[:, None]
        solution = fixed_point(
            logarithm(weight, calls), torch.ones_like(given), (given,), solver=solver,
            adjoint=Unrolled(checkpoint=checkpoint), on_failure="ignore", verify=False,
        )  # fmt: skip
        number = len(calls)
        return solution, torch.autograd.grad(solution.value.sum(), weight)[0], number

    solution, gradient, calls = run(1.0, -1.0, 2.0)
    expected, other, fewer = run(1.0, 2.0)
    assert calls == fewer + 1
    torch.testing.assert_close(gradient, other)
    assert solution.status.tolist() == [0, int(Status.NONFINITE), 0]
    assert torch.equal(solution.value[[0, 2]], expected.value)
    assert solution.value[1] == 1


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
        with pytest.raises(ValueError, match="energy"):
            fixed_point(solvers.Descent(energies[kind]), x, (x,), solver=solver)


@pytest.mark.parametrize("adjoint", [Implicit(tolerance=TIGHT_SOURCE), Phantom(60), OneStep()])
def test_a_sample_that_diverged_has_a_gradient_of_zero(adjoint: Adjoint) -> None:
    """Its best iterate is no solution, also where the adjoint system there has one."""
    weight = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    factor = torch.tensor([[0.5], [3.0]], dtype=torch.float64)
    solution = fixed_point(
        lambda z, x, factor: factor * weight * z + x, torch.zeros_like(x), (x, factor),
        solver=Forward(), tolerance=TIGHT_SOURCE, on_failure="ignore", max_steps=200,
        adjoint=adjoint,
    )  # fmt: skip
    assert solution.status.tolist() == [Status.CONVERGED, Status.DIVERGED]
    by_weight, by_input = torch.autograd.grad(solution.value.sum(), (weight, x))
    assert not bool(by_input[1].any())
    # z = x / (1 - w / 2) of the first sample; one evaluation knows df/dx = 1 and df/dw = z / 2 alone.
    slope = 1.0 if isinstance(adjoint, OneStep) else 2.0
    torch.testing.assert_close(by_input[0], torch.full_like(x[0], slope))
    torch.testing.assert_close(by_weight.item(), 3 * slope)


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


def test_a_third_derivative_needs_unrolling() -> None:
    weight, x = layer_inputs(3, 4)

    def third(adjoint: Adjoint) -> Tensor:
        slope = solve_layer(weight.detach(), x, adjoint).value
        for _ in range(3):
            (slope,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return slope

    with pytest.raises(RuntimeError, match="Unrolled"):
        third(Implicit(tolerance=TIGHT_SOURCE))
    assert bool((third(Unrolled()) != 0).any())


@pytest.mark.parametrize(("adjoint", "solver", "requires_grad"), [
    (Implicit(), Forward(), False), (Phantom(3), Anderson(), True), (OneStep(), Forward(), True),
])  # fmt: skip
def test_forward_mode_raises(adjoint: Adjoint, requires_grad: bool, solver: solvers.Solver) -> None:
    """Their derivative is not that of the iterations, which forward mode would return."""
    f, z0, (weight, x) = plain_batch(2)
    x.requires_grad_(requires_grad)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises((RuntimeError, NotImplementedError)):
            fixed_point(f, z0, (weight, dual), adjoint=adjoint, solver=solver)


def test_a_failed_adjoint_solve_is_reported() -> None:
    weight, x = layer_inputs(3, 4)
    hurried = partial(Implicit, tolerance=TIGHT_SOURCE, max_steps=1)
    solution = solve_layer(weight, x, hurried())
    with pytest.warns(solvers.SolveWarning):
        solution.value.sum().backward()
    report = solution.adjoint.solution
    assert report is not None
    assert (report.status == Status.MAX_STEPS).all()
    assert (report.residual > 1e-12).all() and (report.evaluations <= 1).all()
    solve_layer(weight, x, hurried(on_failure="ignore")).value.sum().backward()
    loud = solve_layer(weight, x, hurried(on_failure="raise"))
    with pytest.raises(solvers.SolveError):
        loud.value.sum().backward()


KINDS: list[Any] = [Implicit(tolerance=TIGHT_SOURCE), Phantom(3), OneStep()]


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


@pytest.mark.parametrize(("argument", "options"), [
    ("Forward", {}),
    ("solver", {"solver": Broyden()}),
    ("callback", {"solver": Forward(), "callback": print}),
    ("checkpoint", {"solver": Forward(), "adjoint": Unrolled(checkpoint=True)}),
])  # fmt: skip
def test_what_unrolling_cannot_do_inside_a_transform_raises(
    argument: str, options: dict[str, Any]
) -> None:
    layer = Layer(Map(), **({"adjoint": Unrolled()} | options))
    with pytest.raises(RuntimeError, match=argument):
        grad(lambda x: layer(x).sum())(normal(2, 4))


def test_forward_over_reverse_is_not_implemented_for_implicit_gradients() -> None:
    layer = Layer(Map(), adjoint=KINDS[0])
    with pytest.raises(NotImplementedError):
        hessian(lambda x: layer(x).sum())(normal(2, 4))


def test_unrolling_inside_a_transform_equals_unrolling_outside() -> None:
    """Values and gradients of the same evaluations, as no sample moves when it has converged."""
    plain, x = Map(), normal(3, 4)
    call: dict[str, Any] = {"adjoint": Unrolled(), "solver": Anderson(memory=2), "max_steps": 40}
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

    for call["max_steps"] in (40, 3):  # converged, and not
        outside = fixed_point(plain, torch.zeros_like(x), (x,), **call)
        status, evaluations, residual = vmap(counts)(x)
        assert torch.equal(status, outside.status)
        assert torch.equal(evaluations, outside.evaluations)
        close(residual, outside.residual)


@pytest.mark.parametrize(
    "adjoint", [Implicit(), Phantom(), OneStep(), Unrolled(), Unrolled(checkpoint=True)], ids=repr
)
def test_a_solve_makes_one_power_iteration_of_a_spectral_norm(adjoint: Adjoint) -> None:
    torch.manual_seed(0)
    linear = spectral_norm(nn.Linear(4, 4, dtype=torch.float64))
    other = spectral_norm(nn.Linear(4, 4, dtype=torch.float64))
    other.load_state_dict(linear.state_dict())
    x = torch.randn(3, 4, dtype=torch.float64)
    options: dict[str, Any] = {"adjoint": adjoint, "tolerance": 1e-10, "max_steps": 200}
    options |= {"solver": "forward"}
    found = fixed_point(lambda z, x: 0.5 * torch.tanh(linear(z)) + x, x, (x,), **options)
    found.value.sum().backward()
    weight = other.weight  # one power iteration
    for mine, theirs in zip(linear.buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    z = found.value.detach()
    torch.testing.assert_close(0.5 * torch.tanh(z @ weight.mT + linear.bias) + x, z)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        query, key = self.query(z)[:, None], self.key(z)[:, None]
        return 0.2 * nn.functional.scaled_dot_product_attention(query, key, key)[:, 0] + x


def test_second_derivatives_of_attention_in_another_thread() -> None:
    """The numbers of autograd's nodes are those of a thread, and CUDA's backward pass has its own."""
    torch.manual_seed(0)
    f, x = SelfAttention(), torch.randn(2, 3, 4, requires_grad=True)
    value = [fixed_point(f, torch.zeros_like(x), (x,), tolerance=1e-6).value for _ in range(2)]

    def twice(value: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(twice, value[0]).result(60), twice(value[1]))

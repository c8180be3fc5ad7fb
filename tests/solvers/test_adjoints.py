"""Derivatives through a fixed point: by every way in, of any order; right or an error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import solvers
from cases.solves import normal, plain_batch, tanh_layer
from problems import matvec, orthogonal
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
    ("solver", "steps", "repeated"),
    [*((*row, False) for row in UNROLLED), (*UNROLLED[1], True)],
)
def test_unrolled_steps_of_a_map(solver: Solver, steps: int, repeated: bool) -> None:
    """Also where the evaluations of f are repeated in the backward pass."""

    def f(z: Tensor, *args: Tensor) -> Tensor:
        if not repeated:
            return tanh_layer(z, *args)
        return checkpoint(tanh_layer, z, *args, use_reentrant=False)

    def solve(weight: Tensor, x: Tensor, z0: Tensor) -> Tensor:
        return fixed_point(
            f, z0, (weight, x), solver=solver, tolerance=0.0,
            max_steps=steps, adjoint=Unrolled(), on_failure="ignore",
        ).value  # fmt: skip

    weight, x = layer_inputs(dim=4)
    inputs = (weight, x, torch.full_like(x, 0.1).requires_grad_())
    assert gradcheck(solve, inputs)
    assert gradgradcheck(solve, inputs, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("solver", [LBFGS(memory=2), GradientDescent("auto")])
def test_unrolled_steps_of_an_energy(solver: Solver) -> None:
    solve = descent_solve(Unrolled(), solver, tolerance=0.0, max_steps=5)
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


class Affine(nn.Module):
    """The same map as a module."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach())

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.weight.mT + x)


def inputs_of_maps() -> list[Tensor]:
    return [(normal(4, 4) / 5).requires_grad_(), normal(3, 4).requires_grad_()]


def solved(f: Any, args: tuple[Any, ...], adjoint: Adjoint, **options: Any) -> Tensor:
    given: dict[str, Any] = {"tolerance": TIGHT_SOURCE, "max_steps": 100, "adjoint": adjoint}
    return fixed_point(f, torch.zeros(3, 4).double(), args, **(given | options)).value


@pytest.mark.parametrize(
    "make", [through_a_closure, through_a_captured_result, through_nested_args]
)
@pytest.mark.parametrize("adjoint", EXACT)
def test_gradients_agree_for_every_way_to_pass_a_tensor(make: Any, adjoint: Adjoint) -> None:
    found = []
    for way in (through_args, make):
        inputs = inputs_of_maps()
        f, args = way(*inputs)
        loss = solved(f, args, adjoint).pow(3).sum()
        found.append(torch.autograd.grad(loss, inputs))
    torch.testing.assert_close(found[1], found[0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("way", ["args", "module", "functional_call", "method"])
@pytest.mark.parametrize("order", [2, 3])
def test_higher_derivatives_agree_with_unrolling(way: str, order: int) -> None:
    """Of arguments, and of the parameters of a module, also of those that are put in its place."""

    def derivative(adjoint: Adjoint, way: str) -> list[Tensor]:
        weight, x = inputs_of_maps()
        module = Affine(weight)
        inputs = [weight, x]
        f, args = through_args(weight, x)
        if way == "functional_call":
            layer = Layer(Affine(torch.zeros(4, 4).double()), adjoint=adjoint)
            value = functional_call(layer, {"inner.weight": weight}, x)
        elif way == "args":
            # Plain steps converge with all of their derivatives; accelerated ones may stop earlier.
            plain = {"solver": Forward()} if isinstance(adjoint, Unrolled) else {}
            value = solved(f, args, adjoint, **plain)
        else:
            inputs[0] = module.weight
            value = solved(module if way == "module" else module.forward, (x,), adjoint)
        loss = value.pow(3).sum()
        for _ in range(order - 1):
            slopes = torch.autograd.grad(loss, inputs, create_graph=True)
            loss = torch.stack([slope.square().sum() for slope in slopes]).sum()
        return list(torch.autograd.grad(loss, inputs))

    expected = derivative(Unrolled(), "args")
    found = derivative(EXACT[0], way)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("make", [through_a_closure, through_a_captured_result])
def test_a_captured_tensor_has_first_derivatives_only(make: Any) -> None:
    inputs = inputs_of_maps()
    f, args = make(*inputs)
    loss = solved(f, args, EXACT[0]).pow(3).sum()
    with pytest.raises(RuntimeError, match="captures a tensor"):
        torch.autograd.grad(loss, inputs, create_graph=True)


def test_second_derivatives_by_weights_that_an_optimizer_has_changed_raise() -> None:
    module, x = Affine(normal(4, 4) / 5), normal(3, 4).requires_grad_()
    value = solved(module, (x,), EXACT[0])
    with torch.no_grad():
        module.weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(value.sum(), x, create_graph=True)


class Tripled(torch.autograd.Function):
    """Counts how often gradients reach what stands in front of a solve."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        Tripled.calls += 1
        return 3 * cotangents[0]


@pytest.mark.parametrize("adjoint", [*EXACT, Phantom(30), OneStep()], ids=str)
@pytest.mark.parametrize("scale", [0.5, -1.0])
def test_hooks_and_functions_in_front_act_once(adjoint: Adjoint, scale: float) -> None:
    def gradients(hooked: bool) -> list[Tensor]:
        module, x, fired = Map(), normal(3, 4).requires_grad_(), []
        parameters = list(module.parameters())
        if hooked:
            for tensor in (*parameters, x):
                tensor.register_hook(lambda g: scale * g)
            together = torch.autograd.graph.register_multi_grad_hook
            together(parameters, lambda grads: fired.append(grads), mode="all")
            together(parameters, lambda grad: fired.append(grad), mode="any")
        Tripled.calls = 0
        solved(module, (Tripled.apply(x),), adjoint).square().sum().backward()
        assert Tripled.calls == 1
        assert len(fired) == (2 if hooked else 0)
        grads = [tensor.grad for tensor in (*parameters, x)]
        return [g for g in grads if g is not None]

    plain, changed = gradients(False), gradients(True)
    assert len(plain) == len(changed) == 3
    for one, other in zip(plain, changed, strict=True):
        torch.testing.assert_close(other, scale * one)


def test_a_backward_pass_leaves_no_gradient_at_the_solution() -> None:
    seen: list[Tensor] = []

    def f(z: Tensor, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            seen.append(z)
        return 0.5 * torch.tanh(z) + x

    x = normal(3, 4).requires_grad_()
    solved(f, (x,), EXACT[0]).sum().backward()
    assert len(seen) == 1 and seen[0].requires_grad
    pending: list[Any] = [seen[0].grad_fn]
    while pending:
        node = pending.pop()
        leaf = getattr(node, "variable", None)
        assert leaf is None or leaf is x or leaf.grad is None
        pending += [following for following, _ in node.next_functions if following is not None]
    assert x.grad is not None


@pytest.mark.parametrize("adjoint", [*EXACT, Phantom(3), OneStep()], ids=str)
def test_a_layer_within_a_checkpoint_repeats_the_same_operations(adjoint: Adjoint) -> None:
    """In every training step: no solve depends on how many there were before."""
    f = Descent(lambda z, x: (0.5 * (z - x).square() + 0.3 * z.cos()).sum(1))
    x = normal(3, 4).requires_grad_()

    def layer(x: Tensor) -> Tensor:
        return solved(f, (x,), adjoint, tolerance=1e-6)

    (expected,) = torch.autograd.grad(layer(x).pow(2).sum(), x)
    for _ in range(12):
        (found,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).pow(2).sum(), x)
        torch.testing.assert_close(found, expected)


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


ALL: list[Adjoint] = [*EXACT, Phantom(3), OneStep()]


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
@pytest.mark.parametrize("solver", [Anderson(), Forward()])
def test_an_unrolled_solve_with_a_failed_sample_is_not_repeated(solver: Solver) -> None:
    """Its first evaluation is, without the sample; the others' gradients are those without it."""

    def run(*x: float) -> tuple[solvers.Solution, Tensor, int]:
        weight, calls = torch.tensor(0.5, dtype=torch.float64, requires_grad=True), []
        given = torch.tensor(x, dtype=torch.float64)[:, None]
        solution = fixed_point(
            logarithm(weight, calls), torch.ones_like(given), (given,), solver=solver,
            adjoint=Unrolled(), on_failure="ignore", verify=False,
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
def test_a_start_that_is_the_solution_has_a_gradient_of_zero() -> None:
    """No step depends on the weight; the backward pass must run all the same."""
    weight = torch.tensor(0.5, requires_grad=True)
    solution = fixed_point(lambda z: weight * z, torch.zeros(2, 3), adjoint=Unrolled())
    assert solution.converged.all()
    solution.value.sum().backward()
    assert weight.grad == 0


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


@pytest.mark.parametrize("mode", ["warn", "raise", "ignore"])
def test_an_adjoint_without_a_finite_solution_is_reported(mode: str) -> None:
    """The derivative of ``|z|``, written as a root of a square, is NaN at zero."""
    x = torch.zeros(2, 3, requires_grad=True)
    found = fixed_point(
        lambda z, x: 0.5 * z.square().sqrt() + x, torch.zeros(2, 3), (x,),
        tolerance=Tolerance(1e-6, 1e-6), adjoint=Implicit(on_failure=mode),
    )  # fmt: skip
    assert found.converged.all()
    expected: Any = {
        "warn": pytest.warns(solvers.SolveWarning, match="adjoint"),
        "raise": pytest.raises(solvers.SolveError, match="adjoint"),
        "ignore": nullcontext(),
    }
    with expected[mode]:
        found.value.sum().backward()
    report = found.adjoint.solution
    assert report is not None and report.statuses == ["NONFINITE"] * 2
    if mode != "raise":
        assert x.grad is not None and x.grad.isnan().all()


@pytest.mark.parametrize("transform", [
    lambda solve, x: grad(lambda x: solve(x).sum())(x),
    lambda solve, x: jacrev(solve)(x),
    lambda solve, x: vmap(lambda row: solve(row[None])[0])(x),
])  # fmt: skip
@pytest.mark.parametrize("adjoint", ALL, ids=str)
def test_a_solve_inside_of_a_transform_names_what_works(transform: Any, adjoint: Adjoint) -> None:
    with pytest.raises(RuntimeError, match=r"layer.unrolled\(k\)"):
        transform(Layer(Map(), adjoint=adjoint), normal(3, 4))


@pytest.mark.parametrize("adjoint", [Implicit(), Phantom(), OneStep(), Unrolled()], ids=repr)
def test_a_solve_makes_one_power_iteration_of_a_cached_spectral_norm(adjoint: Adjoint) -> None:
    torch.manual_seed(0)
    linear = spectral_norm(nn.Linear(4, 4, dtype=torch.float64))
    other = spectral_norm(nn.Linear(4, 4, dtype=torch.float64))
    other.load_state_dict(linear.state_dict())
    x = torch.randn(3, 4, dtype=torch.float64)
    options: dict[str, Any] = {"adjoint": adjoint, "tolerance": 1e-10, "max_steps": 200}
    options |= {"solver": "forward"}
    with parametrize.cached():
        found = fixed_point(lambda z, x: 0.5 * torch.tanh(linear(z)) + x, x, (x,), **options)
    found.value.sum().backward()
    lists: Any = linear.parametrizations
    original = lists.weight.original
    assert original.grad is not None and bool(original.grad.any())
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


def test_an_adjoint_whose_residual_is_within_the_tolerance_has_converged() -> None:
    """Also where the first attempt ends there, by Anderson's method, although its error is too large."""
    generator = torch.Generator().manual_seed(0)
    basis = orthogonal(generator, 64, 40)
    hessian = (basis * torch.logspace(-1, 0.6, 40, dtype=torch.float64)) @ basis.mT
    b, weight = torch.randn(2, 64, 40, dtype=torch.float64, generator=generator)
    value = torch.linalg.solve(hessian, b)
    solution = fixed_point(
        Descent(lambda z, H, b: 0.5 * (z * matvec(H, z)).sum(1) - (b * z).sum(1)),
        value, (hessian, b.requires_grad_()), tolerance=1e-3, on_failure="ignore",
    )  # fmt: skip
    (solution.value * weight).sum().backward()
    report = solution.adjoint.solution
    assert report is not None and report.evaluations.max() > 20  # a second attempt was made
    assert report.all_converged()

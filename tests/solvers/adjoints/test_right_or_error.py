"""A gradient is right or an error: failed samples, weights that change, tensors changed in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations

import solvers
from solvers import (
    Adjoint,
    Forward,
    Implicit,
    Newton,
    OneStep,
    Phantom,
    Status,
    Unrolled,
    fixed_point,
)

TIGHT = solvers.Tolerance(rtol=1e-12)
EXACT: list[Adjoint] = [Implicit(tolerance=TIGHT, max_steps=200), Unrolled(), Unrolled(True)]
ALL = [*EXACT, Phantom(3), OneStep()]


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
            f, torch.zeros_like(w), (w, b), adjoint=Implicit(tolerance=TIGHT), tolerance=TIGHT
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
            adjoint=Implicit(tolerance=TIGHT), tolerance=TIGHT,
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


def state() -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def unrolled_loss(model: Model, x: Tensor, **options: Any) -> Tensor:
    adjoint = Unrolled(**options)
    return fixed_point(model, torch.zeros_like(x), (x,), adjoint=adjoint).value.pow(2).sum()


@pytest.mark.defect("C1")
def test_checkpoints_of_parametrised_weights_give_the_unrolled_gradient() -> None:
    model, x = Model(), state().requires_grad_()
    inputs = [*model.parameters(), x]
    expected = torch.autograd.grad(unrolled_loss(model, x), inputs, create_graph=True)
    found = torch.autograd.grad(unrolled_loss(model, x, checkpoint=True), inputs, create_graph=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    seconds = [torch.autograd.grad(g[-1].square().sum(), inputs) for g in (found, expected)]
    for one, other in zip(*seconds, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.defect("A6")
@pytest.mark.parametrize("name", ["linear.bias", "original0", "shift", "x", "x without gradient"])
def test_checkpoints_raise_where_what_f_reads_has_changed(name: str) -> None:
    model, x = Model(), state().requires_grad_(name != "x without gradient")
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
        weight, x = leaf(0.5)[0], leaf(*values)
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


def inputs(batch: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, generator=generator, dtype=torch.float64)


class Wrapped(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner, self.options = Scaled(), options

    def forward(self, x: Tensor) -> Tensor:
        return fixed_point(self.inner, torch.zeros_like(x), (x,), **self.options).value


@pytest.mark.defect("A6")
@pytest.mark.parametrize("how", ["functional_call", "replaced"])
def test_checkpoints_raise_where_f_reads_other_tensors_than_before(how: str) -> None:
    model, x = Wrapped(adjoint=Unrolled(checkpoint=True)), inputs().requires_grad_()
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
        solver=Forward(), tolerance=TIGHT, on_failure="ignore", max_steps=200, **options,
    )  # fmt: skip


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("adjoint", [Implicit(tolerance=TIGHT), Phantom(60), OneStep()])
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
    c, starts = inputs(), torch.stack([inputs(), inputs() * 2, inputs() * 3])

    def solve(q: Tensor) -> Tensor:
        return fixed_point(lambda z: 0.5 * z + c, q, compact=False, tolerance=TIGHT).value

    torch.testing.assert_close(vmap(solve)(starts), (2 * c).expand_as(starts))


@pytest.mark.defect("A8")
@pytest.mark.parametrize("adjoint", ALL)
def test_the_output_may_be_changed_in_place(adjoint: Adjoint) -> None:
    model, x = Wrapped(adjoint=adjoint, tolerance=TIGHT), inputs().requires_grad_()
    expected = torch.autograd.grad((model(x) + 1).pow(2).sum(), [x, *model.parameters()])
    value = model(x)
    value.add_(1)
    found = torch.autograd.grad(value.pow(2).sum(), [x, *model.parameters()])
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


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

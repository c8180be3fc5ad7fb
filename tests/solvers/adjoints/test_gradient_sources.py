"""Everything that f reads gets its gradient: arguments, modules, closures, custom functions."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from cases.solves import plain_batch
from solvers import Adjoint, Descent, Implicit, OneStep, Phantom, Tolerance, Unrolled, fixed_point

TIGHT = Tolerance(rtol=1e-12)
EXACT: list[Adjoint] = [Implicit(tolerance=Tolerance(1e-12), max_steps=200), Unrolled()]
ALL: list[Adjoint] = [*EXACT, Unrolled(checkpoint=True), Phantom(80), OneStep()]
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


def through_a_custom_function_of_a_result(weight: Tensor, x: Tensor) -> Any:
    twice = 2 * weight
    return (lambda z, x: torch.tanh(0.5 * Multiply.apply(z, twice) + x)), (x,)


def through_nested_args(weight: Tensor, x: Tensor) -> Any:
    def f(z: Tensor, inputs: dict[str, Any]) -> Tensor:
        return torch.tanh(z @ weight.mT + inputs["list"][0] + inputs["zero"])

    return f, ({"list": [x], "zero": torch.zeros_like(x), "none": None},)


MAKES: list[Make] = [
    through_args,
    through_a_closure,
    through_a_captured_result,
    through_properties_and_views,
    through_keywords_and_lists,
    through_a_custom_function,
    through_a_custom_function_of_a_result,
    through_nested_args,
]


def gradients(make: Make, adjoint: Adjoint, order: int) -> tuple[Tensor, ...]:
    """Gradient of a loss, or of the squared norm of its gradient, in weight and x."""
    weight, x = leaves()
    f, args = make(weight, x)
    solution = fixed_point(
        f, torch.zeros_like(x), args, tolerance=TIGHT, max_steps=100, adjoint=adjoint
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


@pytest.mark.parametrize("make", MAKES)
def test_phantom_reaches_the_same_inputs(make: Make) -> None:
    reference = gradients(through_args, EXACT[0], 1)
    for mine, expected in zip(gradients(make, Phantom(80), 1), reference, strict=True):
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
        layer, torch.zeros_like(x), (x,), tolerance=TIGHT, max_steps=100, adjoint=adjoint
    ).value


@pytest.mark.parametrize("adjoint", ALL)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_parameters_of_a_module(adjoint: Adjoint, mode: str) -> None:
    layer, x = layer_and_input()
    layer.train(mode == "train")
    run(layer, x, adjoint).square().sum().backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    assert all(grad is not None and bool((grad != 0).any()) for grad in grads)


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


@pytest.mark.parametrize("adjoint", [Implicit(), Phantom(3), OneStep()])
def test_the_start_gets_no_gradient(adjoint: Adjoint) -> None:
    layer, x = layer_and_input()
    z0 = torch.zeros_like(x).requires_grad_()
    value = fixed_point(layer, z0, (x,), adjoint=adjoint).value
    assert torch.autograd.grad(value.sum(), z0, allow_unused=True) == (None,)


PARAMETRIZED: list[Callable[[nn.Module], nn.Module]] = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
]


def originals(layer: Layer) -> list[Tensor]:
    return [p for name, p in layer.named_parameters() if "parametrizations" in name]


@pytest.mark.parametrize("adjoint", [*EXACT, OneStep()])
@pytest.mark.parametrize("wrap", PARAMETRIZED)
def test_parametrised_weights(wrap: Callable[..., nn.Module], adjoint: Adjoint) -> None:
    layer, x = layer_and_input()
    wrap(layer.linear)
    layer.eval()  # spectral_norm moves its vectors in training
    value = 0.5 * run(Half(layer), x, adjoint)
    grads = torch.autograd.grad(value.pow(2).sum(), originals(layer))
    assert all(bool((grad != 0).any()) for grad in grads)
    twin = deepcopy(layer)
    again = torch.autograd.grad((0.5 * run(Half(twin), x, adjoint)).pow(2).sum(), originals(twin))
    for one, other in zip(grads, again, strict=True):
        torch.testing.assert_close(one, other)


class Half(nn.Module):
    """``f / 2``, a contraction for any weight of norm below 2."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * self.layer(z, x)


@pytest.mark.parametrize("adjoint", [Implicit(), Phantom(3), OneStep()])
def test_an_outer_cache_of_parametrised_weights_loses_no_gradient(adjoint: Adjoint) -> None:
    """The solve runs without grad; what it caches must not be what the user differentiates."""
    layer, x = layer_and_input()
    parametrizations.weight_norm(layer.linear)
    expected = torch.autograd.grad(run(Half(layer), x, adjoint).sum(), originals(layer))
    with parametrize.cached():
        value = run(Half(layer), x, adjoint)
        grads = torch.autograd.grad(value.sum(), originals(layer), allow_unused=True)
    for mine, other in zip(grads, expected, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, other)


def test_a_descent_of_a_module_energy_reaches_its_parameters() -> None:
    layer, x = layer_and_input()

    def energy(z: Tensor, x: Tensor) -> Tensor:
        return layer.linear(z).square().sum(1) + (z - x).square().sum(1)

    def loss(adjoint: Adjoint) -> Tensor:
        solution = fixed_point(Descent(energy, 0.3), x, (x,), tolerance=Tolerance(1e-10),
                               max_steps=200, adjoint=adjoint)  # fmt: skip
        return solution.value.pow(3).sum()

    first = torch.autograd.grad(
        loss(Implicit(tolerance=Tolerance(1e-11))), list(layer.parameters())
    )
    second = torch.autograd.grad(loss(Unrolled()), list(layer.parameters()))
    for mine, other in zip(first, second, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)


def through_a_gradient_inside(weight: Tensor, x: Tensor) -> Any:
    """``f = z - dE/dz`` written by hand, with a leaf of its own, as users do."""

    def f(z: Tensor, x: Tensor) -> Tensor:
        with torch.enable_grad():
            own = z.detach().requires_grad_()
            energy = (own @ weight.mT).cosh().log().sum() - (x * own).sum()
            (gradient,) = torch.autograd.grad(energy, own, create_graph=True)
        return -0.2 * gradient + 0.5 * x

    return f, (x,)


@pytest.mark.parametrize("adjoint", [Implicit(tolerance=TIGHT), OneStep(), Phantom(2)])
def test_a_leaf_made_by_f_is_not_taken_for_an_outer_tensor(adjoint: Adjoint) -> None:
    """Its graph ends at that leaf, so f does not depend on z here: one step is exact."""
    weight, x = leaves()
    f, args = through_a_gradient_inside(weight, x)
    solution = fixed_point(f, torch.zeros_like(x), args, tolerance=TIGHT, adjoint=adjoint,
                           max_steps=100)  # fmt: skip
    mine = torch.autograd.grad(solution.value.pow(2).sum(), (weight, x))
    once = f(solution.value.detach(), x)
    expected = torch.autograd.grad(once.pow(2).sum(), (weight, x))
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_tensors_in_plain_batch_keep_their_versions() -> None:
    """A weight changed in place after the solve is noticed, not used."""
    f, z0, (weight, x) = plain_batch(2)
    shared = weight[:1].clone().requires_grad_()
    value = fixed_point(lambda z, x: f(z, shared.expand(z.shape[0], -1, -1), x), z0, (x,)).value
    with torch.no_grad():
        shared.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()

"""Everything that f reads gets its gradient: arguments, modules, closures, custom functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from solvers import Adjoint, Implicit, OneStep, Phantom, Tolerance, Unrolled, fixed_point

TIGHT = Tolerance(rtol=1e-12)
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

"""Closed forms against automatic differentiation, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from cases.energies import (
    COUNT,
    EnergyCase,
    build,
    each_energy,
    few_energies,
    masks,
    relative_error,
    tokens,
)
from implicit_attn.energies import Energy

TOLERANCE = 1e-9


def autograd_gradient(
    energy: Energy, z: Tensor, x: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The point, and the gradient of the forward pass there with its graph."""
    point = z.detach().clone().requires_grad_()
    value = energy(point, x, mask=mask)
    (gradient,) = torch.autograd.grad(value.sum(), point, create_graph=True)
    return point, gradient


@pytest.mark.parametrize("mask_name", masks())
@each_energy
def test_gradient_is_the_derivative_of_forward(case: EnergyCase, mask_name: str) -> None:
    energy = build(case)
    z, x = tokens(case)
    mask = masks()[mask_name]
    _, reference = autograd_gradient(energy, z, x, mask)
    value, gradient = energy.value_and_grad(z, x, mask=mask)
    assert value.shape == (3,)
    assert gradient.shape == z.shape and gradient.dtype == z.dtype
    assert relative_error(value, energy(z, x, mask=mask)) <= TOLERANCE
    assert relative_error(gradient, reference) <= TOLERANCE
    assert relative_error(energy.grad(z, x, mask=mask), reference) <= TOLERANCE


@pytest.mark.parametrize("mask_name", masks())
@each_energy
def test_hessian_product_is_the_derivative_of_the_gradient(
    case: EnergyCase, mask_name: str
) -> None:
    energy = build(case)
    z, x = tokens(case)
    v = torch.randn(z.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    mask = masks()[mask_name]
    point, gradient = autograd_gradient(energy, z, x, mask)
    if gradient.requires_grad:
        (reference,) = torch.autograd.grad(gradient, point, v, materialize_grads=True)
    else:
        reference = torch.zeros_like(z)
    product = energy.hvp(z, v, x, mask=mask)
    assert product.shape == z.shape and product.dtype == z.dtype
    assert relative_error(product, reference) <= TOLERANCE


@each_energy
def test_defaults_agree_with_closed_forms(case: EnergyCase) -> None:
    """``Energy.value_and_grad`` and ``Energy.hvp``, called past the overrides, with and without
    recording."""
    energy = build(case)
    z, x = tokens(case)
    v = torch.flip(z, (0, 1))
    for record in (True, False):
        with torch.set_grad_enabled(record):
            value, gradient = energy.value_and_grad(z, x)
            automatic = Energy.value_and_grad(energy, z, x)
            assert relative_error(automatic[0], value) <= TOLERANCE
            assert relative_error(automatic[1], gradient) <= TOLERANCE
            product = Energy.hvp(energy, z, v, x)
            assert relative_error(product, energy.hvp(z, v, x)) <= TOLERANCE
    assert not automatic[0].requires_grad and not automatic[1].requires_grad


@each_energy
def test_gradient_passes_gradcheck(case: EnergyCase) -> None:
    """First derivatives of the gradient by state, input and weights."""
    energy = build(case, dim=4)
    z, x = tokens(case, batch=2, count=COUNT if case.placed else 3, dim=4)
    names, weights = _trainable(energy)
    inputs = [t.clone().requires_grad_() for t in (z, x, *weights) if t is not None]

    def gradient(z: Tensor, *rest: Tensor) -> Tensor:
        given = list(rest)
        x = given.pop(0) if case.needs_x else None
        return _call(energy, "grad", names, given, z, x)

    assert gradcheck(gradient, inputs)


# The weights' second derivatives go through a singular value decomposition where there is a bound.
SECOND_ORDER = (
    "quadratic-input",
    "composition",
    "hopfield-learnable",
    "bisoftmax-soft-4",
    "bisoftmax-none-1",
    "bisoftmax-causal-soft-1",
    "bisoftmax-bound",
    "sigmoid-soft-1",
    "linear-elu-soft-1",
    "softmax-inner-soft-1",
    "softmax-inner-none-1",
    "softmax-elastic-soft-1",
    "softmax-cross-elastic-none-1",
    "bisoftmax-context",
    "sigmoid-context",
    "linear-elu-trained",
    "softmax-elastic-context",
    "softmax-elastic-trained",
    "softmax-cross-elastic-trained",
    "relu-soft",
    "softmax-ff-soft",
    "gated-gelu-soft",
    "relu-bound",
    "relu-soft-bias",
    "relu-soft-gates",
    "softmax-ff-none-context",
    "gated-gelu-none-gates",
    "gelu-soft-gates",
)


@few_energies(*SECOND_ORDER)
def test_gradient_passes_gradgradcheck(case: EnergyCase) -> None:
    energy = build(case, dim=4)
    z, x = tokens(case, batch=1, count=2, dim=4)
    names, weights = _trainable(energy)
    inputs = [t.clone().requires_grad_() for t in (z, x, *weights) if t is not None]

    def gradient(z: Tensor, *rest: Tensor) -> Tensor:
        given = list(rest)
        x = given.pop(0) if case.needs_x else None
        return _call(energy, "grad", names, given, z, x)

    assert gradgradcheck(gradient, inputs)


@few_energies(
    "bisoftmax-soft-4",
    "relu-soft",
    "hopfield-learnable",
    "softmax-elastic-soft-1",
    "softmax-elastic-trained",
    "bisoftmax-trained",
    "sigmoid-trained",
    "linear-elu-trained",
)
def test_value_and_hessian_product_pass_gradcheck(case: EnergyCase) -> None:
    energy = build(case, dim=4)
    z, _ = tokens(case, batch=1, count=3, dim=4)
    v = torch.flip(z, (1, 2))
    names, weights = _trainable(energy)
    inputs = [t.clone().requires_grad_() for t in (z, v, *weights)]

    def both(z: Tensor, v: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        return (
            _call(energy, "forward", names, list(given), z, None),
            _call(energy, "hvp", names, list(given), z, v, None),
        )

    assert gradcheck(both, inputs)


@pytest.mark.parametrize("mask_name", ["holes", "empty-sample"])
@few_energies(
    "bisoftmax-soft-4", "softmax-inner-none-4", "softmax-elastic-soft-4", "linear-elu-soft-4"
)
def test_masked_gradient_stays_differentiable(case: EnergyCase, mask_name: str) -> None:
    energy = build(case)
    z, x = tokens(case)
    mask = masks()[mask_name]
    z = z.requires_grad_()
    assert gradcheck(lambda z: energy.grad(z, x, mask=mask), z)


@few_energies("bisoftmax-soft-4", "relu-tiny", "softmax-elastic-none-4", "linear-soft-4")
def test_state_at_zero_has_finite_exact_derivatives(case: EnergyCase) -> None:
    """Layers start at zero; norms must not turn 0 / 0 there."""
    energy = build(case)
    z = torch.zeros(2, 4, 8, dtype=torch.float64)
    v = torch.randn(z.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    point, gradient = autograd_gradient(energy, z, None, None)
    (reference,) = torch.autograd.grad(gradient, point, v)
    assert torch.isfinite(reference).all()
    assert relative_error(energy.grad(z), gradient) <= TOLERANCE
    assert relative_error(energy.hvp(z, v), reference) <= TOLERANCE


def _trainable(energy: Energy) -> tuple[list[str], list[Tensor]]:
    parameters = dict(energy.named_parameters())
    return list(parameters), [p.detach() for p in parameters.values()]


class _Method(nn.Module):
    """A method of an energy as a module's forward, for ``functional_call``."""

    def __init__(self, energy: Energy, method: str) -> None:
        super().__init__()
        self.inner = energy
        self.method = method

    def forward(self, *arguments: Tensor | None) -> Tensor:
        return getattr(self.inner, self.method)(*arguments)


def _call(
    energy: Energy, method: str, names: list[str], weights: list[Tensor], *arguments: Tensor | None
) -> Tensor:
    values = {f"inner.{name}": weight for name, weight in zip(names, weights, strict=True)}
    return torch.func.functional_call(_Method(energy, method), values, arguments)

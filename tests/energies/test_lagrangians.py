"""Lagrangians: activations are their gradients, and they are convex."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from implicit_attn.energies import (
    IdentityLagrangian,
    IsingLagrangian,
    Lagrangian,
    LayerNormLagrangian,
    ReLULagrangian,
    RMSNormLagrangian,
    SoftmaxLagrangian,
    SphericalLagrangian,
)

LAGRANGIANS = [
    IdentityLagrangian(),
    ReLULagrangian(),
    SoftmaxLagrangian(),
    RMSNormLagrangian(),
    RMSNormLagrangian(epsilon=1e-6),
    LayerNormLagrangian(),
    LayerNormLagrangian(epsilon=1e-6),
    IsingLagrangian(),
    SphericalLagrangian(),
]
SQRT51 = 51**0.5  # s of the sphere at |z|^2 = 25, d = 2
each = pytest.mark.parametrize("lagrangian", LAGRANGIANS, ids=str)


@pytest.fixture
def z() -> Tensor:
    return torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@each
def test_activation_is_the_gradient(lagrangian: Lagrangian, z: Tensor) -> None:
    z = z.requires_grad_()
    value = lagrangian(z)
    assert value.shape == (3,)
    (gradient,) = torch.autograd.grad(value.sum(), z)
    torch.testing.assert_close(lagrangian.activation(z), gradient, rtol=1e-9, atol=1e-9)


@each
def test_hessian_is_exact_symmetric_and_positive_semidefinite(
    lagrangian: Lagrangian, z: Tensor
) -> None:
    for token in z.flatten(0, 1):
        jacobian = torch.autograd.functional.jacobian(lagrangian.activation, token)
        assert isinstance(jacobian, Tensor)
        rows = torch.stack([lagrangian.hessian_product(token, e) for e in torch.eye(6).double()])
        torch.testing.assert_close(rows, jacobian, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(jacobian, jacobian.T)
        assert torch.linalg.eigvalsh(jacobian).min() >= -1e-9


@each
def test_second_derivatives_of_the_value_at_exactly_zero(lagrangian: Lagrangian) -> None:
    """What a loss of the gradient of an energy differentiates, from a state or weights of zeros."""
    z = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
    v = torch.arange(1.0, 7.0, dtype=torch.float64).unsqueeze(0)
    (slope,) = torch.autograd.grad(lagrangian.token_value(z).sum(), z, create_graph=True)
    (product,) = torch.autograd.grad((slope * v).sum(), z)
    torch.testing.assert_close(product, lagrangian.hessian_product(z.detach(), v))


@each
def test_masked_tokens_do_not_count(lagrangian: Lagrangian, z: Tensor) -> None:
    mask = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])
    value = lagrangian(z, mask=mask)
    garbage = z.masked_fill(~mask.unsqueeze(-1), float("nan"))
    assert torch.equal(lagrangian(garbage, mask=mask), value)
    assert value[1] == 0
    torch.testing.assert_close(value[:1], lagrangian(z[:1, mask[0]]))
    torch.testing.assert_close(value[2:], lagrangian(z[2:]))


def test_values_and_activations_by_hand() -> None:
    z = torch.tensor([[[3.0, -4.0]]], dtype=torch.float64)
    cases: list[tuple[Lagrangian, float, list[float]]] = [
        (IdentityLagrangian(), 12.5, [3.0, -4.0]),
        (ReLULagrangian(), 4.5, [3.0, 0.0]),
        (SoftmaxLagrangian(), 3.0009114664537737, [0.9990889488055994, 0.0009110511944006454]),
        (RMSNormLagrangian(epsilon=1.0), 2 * 13.5**0.5, [3 / 13.5**0.5, -4 / 13.5**0.5]),
        (LayerNormLagrangian(epsilon=3.75), 8.0, [3.5 / 4, -3.5 / 4]),
        (
            IsingLagrangian(),
            math.log(4 * math.cosh(3) * math.cosh(4)),
            [math.tanh(3), -math.tanh(4)],
        ),
        (
            SphericalLagrangian(),
            SQRT51 - 1 - math.log((1 + SQRT51) / 2),
            [6 / (1 + SQRT51), -8 / (1 + SQRT51)],
        ),
    ]
    for lagrangian, value, activation in cases:
        assert lagrangian(z).item() == pytest.approx(value, rel=1e-12)
        assert lagrangian.activation(z).flatten().tolist() == pytest.approx(activation, rel=1e-12)

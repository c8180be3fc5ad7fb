"""The gain-free norm and its derivatives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from implicit_attn.energies import RMSNorm


@pytest.fixture
def y() -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("epsilon", [1.0, 0.1, 1e-6])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e3])
def test_value(y: Tensor, epsilon: float, scale: float) -> None:
    y = scale * y
    unit, radius = RMSNorm(epsilon).normalise(y)
    for row, unit_row, r in zip(y, unit, radius, strict=True):
        expected = math.sqrt(sum(float(c) ** 2 for c in row) / 5 + epsilon)
        assert float(r) == pytest.approx(expected, rel=1e-14)
        torch.testing.assert_close(unit_row, row / expected)
    assert (unit.square().sum(-1) <= 5 * (1 + 1e-12)).all()


@pytest.mark.parametrize("epsilon", [1.0, 1e-6])
def test_jacobian_is_symmetric_and_exact(y: Tensor, epsilon: float) -> None:
    norm = RMSNorm(epsilon)
    unit, radius = norm.normalise(y)
    for row in range(4):
        jacobian = torch.autograd.functional.jacobian(lambda t: norm.normalise(t)[0], y[row])
        assert isinstance(jacobian, Tensor)
        torch.testing.assert_close(jacobian, jacobian.T)
        for v in y:
            product = norm.jacobian_product(unit[row], radius[row], v)
            torch.testing.assert_close(product, jacobian @ v)


@pytest.mark.parametrize("epsilon", [1.0, 1e-6])
def test_hessian_product(y: Tensor, epsilon: float) -> None:
    """Of ``E(y / r)`` with a curved E: both the curvature of E and that of the norm."""
    norm = RMSNorm(epsilon)
    matrix = y.T @ y
    v = torch.flip(y, (0,))

    def energy(y: Tensor) -> Tensor:
        unit = norm.normalise(y)[0]
        return 0.5 * unit @ matrix @ unit + unit.pow(3).sum()

    unit, radius = norm.normalise(y)
    tangent = norm.jacobian_product(unit, radius, v)
    gradient = unit @ matrix + 3 * unit.square()
    curved = tangent @ matrix + 6 * unit * tangent
    product = norm.hessian_product(unit, radius, gradient, curved, v)
    for row in range(4):
        hessian = torch.autograd.functional.hessian(energy, y[row])
        assert isinstance(hessian, Tensor)
        torch.testing.assert_close(product[row], hessian @ v[row])


def test_half_precision_accumulates_wide() -> None:
    y = torch.full((1, 4096), 100.0, dtype=torch.float16)
    unit, radius = RMSNorm(1.0).normalise(y)
    assert unit.dtype == torch.float16
    assert float(radius) == pytest.approx(100.0, rel=1e-3)
    assert torch.isfinite(unit).all()

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


def test_half_precision_accumulates_wide() -> None:
    y = torch.full((1, 4096), 100.0, dtype=torch.float16)
    unit, radius = RMSNorm(1.0).normalise(y)
    assert unit.dtype == torch.float16
    assert float(radius) == pytest.approx(100.0, rel=1e-3)
    assert torch.isfinite(unit).all()

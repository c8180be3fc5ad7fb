"""Feature maps: each derivative against autograd, and the names that are checked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from implicit_attn.energies import LinearAttention
from implicit_attn.energies.feature_maps import FEATURE_MAPS, NONLINEAR_MAPS, map_features


def along(y: Tensor, value: Tensor) -> Tensor:
    """The derivative of each entry of ``value`` by its entry of ``y``; 0 where it is constant."""
    if not value.requires_grad:
        return torch.zeros_like(y)
    (slope,) = torch.autograd.grad(value.sum(), y, create_graph=True, allow_unused=True)
    return torch.zeros_like(y) if slope is None else slope


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_derivatives(name: str) -> None:
    y = torch.linspace(-6.0, 6.0, 40, dtype=torch.float64).requires_grad_()  # without 0, a kink
    mapped, flat = map_features(name, y), map_features(name, y, bent=False)
    slope = torch.ones_like(y) if mapped.slope is None else mapped.slope
    bend = torch.zeros_like(y) if mapped.bend is None else mapped.bend
    first = along(y, mapped.value)
    assert torch.allclose(slope, first, atol=1e-12)
    assert torch.allclose(bend, along(y, first), atol=1e-12)
    assert flat.bend is None and torch.equal(flat.value, mapped.value)
    v, force, curved = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).double()
    assert torch.allclose(mapped.push(v), slope * v)
    turned = mapped.pull_back_curvature(force, curved, v)
    assert torch.allclose(turned, slope * curved + bend * v * force)


def test_names() -> None:
    assert set(FEATURE_MAPS) - set(NONLINEAR_MAPS) == {"identity"}
    with pytest.raises(ValueError, match=r"feature_map must be one of .* got 'cosine'"):
        LinearAttention(8, 2, feature_map="cosine")

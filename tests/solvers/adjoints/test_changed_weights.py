"""Checkpoints notice plain weights that change between the forward and the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from solvers import Unrolled, fixed_point


@pytest.mark.defect("A6")
@pytest.mark.parametrize("name", ["weight", "bias", "x"])
def test_checkpoints_raise_where_a_plain_weight_has_changed(name: str) -> None:
    """The defect itself was silent: the repeated evaluation read what it found by then."""
    torch.manual_seed(0)
    linear = nn.Linear(3, 3).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    value = fixed_point(
        lambda z, x: 0.4 * torch.tanh(linear(z) + x), torch.zeros_like(x), (x,),
        adjoint=Unrolled(checkpoint=True),
    ).value  # fmt: skip
    with torch.no_grad():
        {"weight": linear.weight, "bias": linear.bias, "x": x}[name].add_(0.1)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        value.pow(2).sum().backward()

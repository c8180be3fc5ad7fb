"""The zero-sum gauge."""

from __future__ import annotations

import pytest
import torch

from cases.potts import random_couplings
from implicit_attn.energies.spins import binary_size, check_couplings, zero_sum


def couplings(seed: int = 0) -> torch.Tensor:
    return random_couplings(5, 3, torch.Generator().manual_seed(seed))


def test_the_gauge_has_zero_sums_and_is_kept() -> None:
    gauged = zero_sum(couplings() + couplings(1).transpose(2, 3))
    torch.testing.assert_close(gauged.sum(2), torch.zeros(5, 5, 3).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(gauged, gauged.permute(1, 0, 3, 2))
    torch.testing.assert_close(zero_sum(gauged), gauged)


def test_directions_are_averaged() -> None:
    single = torch.zeros(2, 2, 2, 2)
    single[0, 1] = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    assert torch.equal(zero_sum(single)[0, 1], 0.5 * single[0, 1])
    assert torch.equal(zero_sum(single)[1, 0], 0.5 * single[0, 1])


@pytest.mark.parametrize("scale", [1.0, 0.7, 3e-30, 2e38, 0.0])
def test_dividing_by_the_size_rounds_nothing(scale: float) -> None:
    scaled = couplings().float() / couplings().abs().max() * scale
    size = binary_size(scaled)
    assert torch.equal(scaled / size * size, scaled)
    assert scale == 0 or 1 <= float((scaled / size).abs().max()) < 2


def test_wrong_couplings() -> None:
    with pytest.raises(TypeError, match="truth must be a floating"):
        check_couplings(torch.zeros(3, 3, 2, 2, dtype=torch.long), "truth")
    with pytest.raises(ValueError, match=r"\(N, N, d, d\)"):
        zero_sum(torch.zeros(3, 2, 2, 2))
    with pytest.raises(ValueError, match="finite"):
        zero_sum(torch.full((2, 2, 2, 2), float("inf")))

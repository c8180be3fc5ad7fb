"""The free energy of attention weights: its minimum, and how far above that it is elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from implicit_attn.kernels import helmholtz_free_energy


@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_it_exceeds_its_minimum_by_the_divergence_from_the_softmax(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    energies, logits = torch.randn(2, 50, 6, generator=generator, dtype=torch.float64)
    weights, best = logits.softmax(-1), (-energies / temperature).softmax(-1)
    least = -temperature * torch.logsumexp(-energies / temperature, -1)
    found = helmholtz_free_energy(weights, energies, temperature)
    divergence = F.kl_div(best.log(), weights, reduction="none").sum(-1)
    torch.testing.assert_close(found - least, temperature * divergence, rtol=1e-12, atol=1e-13)
    assert (found >= least).all()
    at_best = helmholtz_free_energy(best, energies, temperature)
    torch.testing.assert_close(at_best, least, rtol=1e-13, atol=1e-13)


def test_weights_of_zero_cost_nothing() -> None:
    energies = torch.tensor([2.0, 5.0])
    assert helmholtz_free_energy(torch.tensor([1.0, 0.0]), energies, 0.7).item() == 2.0
    cold_and_hot = helmholtz_free_energy(
        torch.tensor([[0.5, 0.5]] * 2), energies, torch.tensor([1.0, 2.0])
    )
    torch.testing.assert_close(cold_and_hot[0] - cold_and_hot[1], torch.tensor(0.5).log().neg())


def test_mistakes() -> None:
    weights = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match="energies must have as many entries"):
        helmholtz_free_energy(weights, torch.zeros(3), 1.0)
    with pytest.raises(ValueError, match=r"energies must broadcast .* \(2,\), got \(4,\)"):
        helmholtz_free_energy(torch.ones(2, 3), torch.ones(4, 3), 1.0)
    with pytest.raises(ValueError, match=r"temperature must broadcast .* \(2,\), got \(5,\)"):
        helmholtz_free_energy(torch.ones(2, 3), torch.ones(2, 3), torch.ones(5))
    with pytest.raises(ValueError, match="temperature must be finite and > 0"):
        helmholtz_free_energy(weights, weights, 0.0)

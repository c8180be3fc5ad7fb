"""Learning rules of bare attention against automatic differentiation, and what they minimise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases.bare import KEEP, features, made, on_circles, seeded
from implicit_attn.energies import BareAttention
from solvers import TorusSite

F64 = torch.float64


def by_autograd(energy: BareAttention, z: Tensor, rule: str, mask: Tensor | None = None) -> Tensor:
    """The gradient of the rule's loss by the free entries of J."""
    terms = -energy.log_prob(z, mask=mask) if rule == "exact" else energy(z, mask=mask).unsqueeze(1)
    return torch.autograd.grad(terms.sum(1).mean(), energy.couplings.free)[0]


@pytest.mark.parametrize("rule", ["exact", "source"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("width", [None, 6])
@pytest.mark.parametrize("masked", [False, True])
def test_a_local_rule_is_the_gradient_of_its_loss(
    rule: str, symmetric: bool, width: int | None, masked: bool
) -> None:
    given = None if width is None else features(4, width)
    energy = made(lam=1.4, features=given, symmetric_sites=symmetric, site=TorusSite())
    z, mask = on_circles(3, 4, energy.width), KEEP if masked else None
    expected = by_autograd(energy, z, rule, mask)
    gradient = energy.local_gradient(z, rule, mask=mask)
    assert gradient.shape == (4, 4, 4, 4)
    assert gradient[range(4), range(4)].abs().max() == 0
    energy.assign_gradient(gradient)
    assert energy.couplings.free.grad is not None
    torch.testing.assert_close(energy.couplings.free.grad, expected, rtol=1e-10, atol=1e-13)


def test_hebbs_rule_is_the_limit_of_a_small_lam_and_the_first_step_of_every_rule() -> None:
    z = on_circles(6, 4, 4)
    blocks = torch.einsum("nia,njb->ijab", z, z) / -(6 * 3)
    blocks[range(4), range(4)] = 0.0
    energy = made(lam=1e-7, site=TorusSite())
    torch.testing.assert_close(energy.local_gradient(z, "hebb"), blocks)
    torch.testing.assert_close(energy.local_gradient(z, "source"), blocks, rtol=1e-5, atol=1e-6)
    zero = made(lam=1.0, site=TorusSite())
    with torch.no_grad():
        zero.couplings.free.zero_()
    for rule in ("hebb", "source", "exact"):
        torch.testing.assert_close(zero.local_gradient(z, rule), blocks, rtol=1e-12, atol=1e-14)


def test_without_the_normaliser_the_loss_has_no_minimum() -> None:
    """Times 10, E falls about tenfold, for ever; the likelihood has a best scale."""
    z = on_circles(200, 4, 4)
    sums, losses = [], []
    for size in (0.3, 3.0, 30.0):
        energy = made(site=TorusSite(), size=size)
        sums.append(energy(z).mean().item())
        losses.append(-energy.log_prob(z).sum(1).mean().item())
    assert sums[0] > sums[1] > sums[2]
    assert sums[2] / sums[1] == pytest.approx(10, rel=0.1)
    assert losses[2] > losses[1] > losses[0] > 0  # data without structure: the best J is 0


def test_on_a_ball_the_small_lam_minimum_is_hebbs_matrix() -> None:
    """E is linear in J for lam -> 0, so its minimum on ``|J|_F <= 1`` points along the data."""
    z = on_circles(6, 4, 4)
    hebb = -made(lam=1e-6).local_gradient(z, "hebb")
    best = hebb / hebb.norm()
    energy = made(lam=1e-6)
    energy.couplings.weight = best
    smallest = energy(z).mean().item()
    for seed in range(20):
        other = torch.randn(best.shape, generator=seeded(seed), dtype=F64)
        other = (best + 0.3 * other) * (best != 0)
        energy.couplings.weight = other / other.norm()
        assert energy(z).mean().item() > smallest


def test_wrong_samples_and_gradients_are_named() -> None:
    energy = made(site=TorusSite())
    for rule in ("exact", "source", "hebb"):
        with pytest.raises(ValueError, match="z must hold at least one sample"):
            energy.local_gradient(on_circles(0, 4, 4), rule)
    gradient = energy.local_gradient(on_circles(2, 4, 4))
    for wrong in (None, gradient.float()):
        with pytest.raises(
            TypeError, match=r"gradient must be (a floating tensor|of torch.float64)"
        ):
            energy.assign_gradient(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"gradient must have the shape .*, N = 4, d = 4, got"):
        energy.assign_gradient(gradient[:3])

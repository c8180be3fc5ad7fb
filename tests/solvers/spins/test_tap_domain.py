"""Means lie in the domain of their site, converged or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cases.spin_models import couplings, fields, generator
from solvers import IsingSite, PottsSite, Site, SphericalSite, Status, adaptive_tap

# how far the means of a sample lie outside, (B,)
OUTSIDE: dict[str, tuple[Site, int, Callable[[Tensor], Tensor]]] = {
    "ising": (IsingSite(), 1, lambda m: m.abs().amax((1, 2)) - 1),
    "potts": (PottsSite(), 3, lambda m: torch.maximum(-m, m - 1).amax((1, 2))),
    "sphere": (SphericalSite(), 3, lambda m: m.norm(dim=-1).amax(1) - 3**0.5),
}


@pytest.mark.defect("D6")
@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("onsager", [True, False])
@pytest.mark.parametrize("max_steps", [3, 10])
def test_unconverged_means_stay_in_the_domain(name: str, onsager: bool, max_steps: int) -> None:
    site, dim, outside = OUTSIDE[name]
    unconverged = 0
    for strength in (1.0, 2.0, 4.0):
        random = generator(1)
        blocks = couplings(20, dim, strength / (20 * dim) ** 0.5, random)
        x = fields(32, 20, dim, random, 1.0)
        options = {"max_steps": max_steps, "onsager": onsager, "on_failure": "ignore"}
        solution = adaptive_tap(blocks, x, site=site, adjoint=None, **options)
        unconverged += int((~solution.converged).sum())
        assert (outside(solution.value.mean) <= 1e-12).all()
    assert unconverged


def test_unconverged_means_still_carry_a_gradient() -> None:
    random = generator(1)
    blocks, x = couplings(6, 1, 0.2, random), fields(2, 6, 1, random, 1.0).requires_grad_()
    solution = adaptive_tap(blocks, x, site=IsingSite(), max_steps=4, on_failure="ignore")
    assert (solution.status == Status.MAX_STEPS).all()
    (slope,) = torch.autograd.grad(solution.value.mean.sum(), x)
    exact = adaptive_tap(blocks, x, site=IsingSite())
    (wanted,) = torch.autograd.grad(exact.value.mean.sum(), x)
    # four steps from the start: near the solution, not at it
    torch.testing.assert_close(slope, wanted, rtol=0.05, atol=0.02)

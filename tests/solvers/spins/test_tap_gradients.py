"""Derivatives of the adaptive TAP solution: couplings, fields, parameters of the site."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from cases.spin_models import couplings, fields, generator, symmetric
from solvers import GaussianSite, Implicit, IsingSite, PottsSite, Site, SphericalSite, adaptive_tap

F64 = torch.float64
TIGHT: dict[str, Any] = {"tolerance": 1e-12, "adjoint": Implicit(tolerance=1e-12)}
ALL: dict[str, Any] = {"response": True, "log_partition": True}
MASK = torch.tensor([[True, True, False], [True, True, True]])
CASES: dict[str, tuple[Site, int, dict[str, Any]]] = {
    "ising": (IsingSite(), 1, {}),
    "sphere": (SphericalSite(), 2, {}),
    # The saddle point is no distribution: its log Z belongs to its mean up to O(1/d) alone.
    "saddle point": (SphericalSite(large_dimension=True), 2, {"log_partition": False}),
    "naive": (IsingSite(), 1, {"order": "naive"}),
    "second, masked": (SphericalSite(), 2, {"order": "second", "mask": MASK}),
    "potts, masked": (PottsSite(), 2, {"mask": MASK}),
}


def probe(outputs: tuple[Tensor, ...]) -> Tensor:
    """One smooth number that depends on everything."""
    total = outputs[0].new_zeros(())
    for output in outputs:
        weight = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)
        total = total + (weight * output).sum() + (weight * output).square().sum()
    return total


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name: str) -> None:
    (site, dim, options), random = CASES[name], generator(0)
    raw = couplings(3, dim, 0.5 / dim, random).requires_grad_()
    x = fields(2, 3, dim, random).requires_grad_()

    def solve(raw: Tensor, x: Tensor) -> Tensor:
        chosen = ALL | TIGHT | options
        value = adaptive_tap(symmetric(raw), x, site=site, **chosen).value
        return probe(tuple(t for t in value if t is not None))

    assert gradcheck(solve, (raw, x), fast_mode=True)
    assert gradgradcheck(solve, (raw, x), fast_mode=True, atol=1e-4)


def test_gradients_reach_the_covariance_of_gaussian_sites() -> None:
    random = generator(1)
    raw = couplings(3, 2, 0.1, random).requires_grad_()
    x = fields(2, 3, 2, random).requires_grad_()
    root = torch.eye(2, dtype=F64).mul(0.7).requires_grad_()

    def solve(raw: Tensor, x: Tensor, root: Tensor) -> Tensor:
        site = GaussianSite(root @ root.mT)
        return probe(tuple(adaptive_tap(symmetric(raw), x, site=site, **ALL, **TIGHT).value))

    assert gradcheck(solve, (raw, x, root), fast_mode=True)
    assert gradgradcheck(solve, (raw, x, root), fast_mode=True, atol=1e-4)


class Biased(Site):
    """Ising sites with a learned bias and moment, known by log Z alone."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias)

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        return nn.functional.softplus(2 * (field + self.bias)).sum(-1) - field.sum(-1)


def test_gradients_reach_the_parameters_of_a_users_site() -> None:
    random = generator(2)
    blocks, x = couplings(3, 1, 0.4, random), fields(2, 3, 1, random)
    site = Biased(torch.tensor(0.3, dtype=F64))
    value = adaptive_tap(blocks, x, site=site, **TIGHT).value
    (got,) = torch.autograd.grad(value.mean.sum(), site.bias)
    # The bias is a uniform field, so its gradient is the fields' summed up.
    x.requires_grad_()
    shifted = adaptive_tap(blocks, x + 0.3, site=IsingSite(), **TIGHT).value
    torch.testing.assert_close(value.mean, shifted.mean)
    (wanted,) = torch.autograd.grad(shifted.mean.sum(), x)
    torch.testing.assert_close(got, wanted.sum())


def test_gradient_of_couplings_keeps_their_symmetries() -> None:
    random = generator(3)
    blocks = couplings(4, 3, 0.3, random).requires_grad_()
    x = fields(2, 4, 3, random)
    adaptive_tap(blocks, x, site=PottsSite()).value.mean.square().sum().backward()
    gradient = blocks.grad
    assert gradient is not None
    torch.testing.assert_close(gradient, gradient.permute(1, 0, 3, 2))
    assert not gradient.diagonal(dim1=0, dim2=1).any()
    with torch.no_grad():
        blocks -= 0.1 * gradient
    assert adaptive_tap(blocks, x, site=PottsSite()).converged.all()


RESPONSES: list[tuple[Site, dict[str, Any], bool]] = [
    (GaussianSite(0.5 * torch.eye(2, dtype=F64)), {}, True),  # V does not depend on x
    (PottsSite(), {"order": "naive"}, True),  # V = 0
    (PottsSite(), {}, False),
]


@pytest.mark.parametrize(("site", "options", "same"), RESPONSES)
def test_response_is_the_derivative_at_fixed_variances(
    site: Site, options: dict[str, Any], same: bool
) -> None:
    random = generator(5)
    blocks, x = couplings(3, 2, 0.2, random), fields(1, 3, 2, random)

    def mean(field: Tensor) -> Tensor:
        return adaptive_tap(blocks, field[None], site=site, **TIGHT, **options).value.mean[0]

    total = torch.autograd.functional.jacobian(mean, x[0])
    value = adaptive_tap(blocks, x, site=site, response=True, **TIGHT, **options).value
    assert isinstance(total, Tensor)
    difference = (total - value.response[0]).abs().max()
    assert bool(difference < 1e-9) == same
    assert difference < 0.05 * total.abs().max()

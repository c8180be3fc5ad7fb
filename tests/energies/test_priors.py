"""Laws of hidden units: cumulant functions against integrals, Taylor sums, samples, domains."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from implicit_attn.energies.effective import PRIORS, OneHotPrior, ScalarPrior

SCALAR = {name: prior for name, prior in PRIORS.items() if isinstance(prior, ScalarPrior)}
each_law = pytest.mark.parametrize("name", SCALAR)
FIELDS = torch.linspace(-0.9, 0.9, 13, dtype=torch.float64)


def law(name: str) -> tuple[Tensor, Tensor]:
    """Points and weights of the law itself, which know nothing of K."""
    if name == "normal":
        points, weights = np.polynomial.hermite_e.hermegauss(80)
        weights = weights / math.sqrt(2 * math.pi)
    elif name == "poisson":
        points = np.arange(120.0)
        weights = np.exp(-1 - np.array([math.lgamma(n + 1) for n in points]))
    elif name == "ising":
        points, weights = np.array([-1.0, 1.0]), np.array([0.5, 0.5])
    elif name == "binary":
        points, weights = np.array([0.0, 1.0]), np.array([0.5, 0.5])
    elif name == "constant":
        points, weights = np.ones(1), np.ones(1)
    else:  # Gauss-Legendre on pieces of [0, 500]: exp(-h / 10) is gone there
        nodes, mass = np.polynomial.legendre.leggauss(30)
        edges = np.linspace(0, 500, 251)
        points = (edges[:-1, None] + (nodes + 1)).ravel()  # pieces of length 2
        weights = np.tile(mass, 250) * np.exp(-points)
        if name == "laplace":
            points, weights = np.r_[-points, points], np.r_[weights, weights] / 2
    return torch.from_numpy(points), torch.from_numpy(weights)


@each_law
def test_k_mean_and_variance_are_those_of_the_law(name: str) -> None:
    points, weights = law(name)
    tilted = weights * (FIELDS.unsqueeze(-1) * points).exp()
    total = tilted.sum(-1)
    mean = (tilted * points).sum(-1) / total
    variance = (tilted * points.square()).sum(-1) / total - mean.square()
    prior = SCALAR[name]
    close: Any = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(prior.cumulant_function(FIELDS), total.log(), **close)
    torch.testing.assert_close(prior.activation(FIELDS), mean, **close)
    product = prior.hessian_product(FIELDS, torch.full_like(FIELDS, 2.0))
    torch.testing.assert_close(product, 2 * variance, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(prior.token_value(FIELDS), total.log().sum(), **close)


@pytest.mark.parametrize(
    ("name", "outside"), [("exponential", [1.0, 3.0]), ("laplace", [-1, 1, 7])]
)
def test_outside_the_domain_k_is_infinite_and_nothing_is_differentiable(
    name: str, outside: list[float]
) -> None:
    prior = SCALAR[name]
    t = torch.tensor([*outside, 0.5], dtype=torch.float64, requires_grad=True)
    value = prior.cumulant_function(t)
    assert (value[:-1] == math.inf).all() and value[-1].isfinite()
    (slope,) = torch.autograd.grad(value.sum(), t)
    assert not slope[:-1].isfinite().any()
    torch.testing.assert_close(slope[-1], prior.activation(t.detach())[-1])
    for found in (prior.activation(t), prior.hessian_product(t, torch.ones_like(t))):
        assert found[:-1].isnan().all() and found[-1].isfinite()
    assert prior.cumulant_function(torch.tensor([math.nan])).isnan().all()
    with pytest.raises(ValueError, match="field must lie in"):
        prior.sample(t.detach())


@each_law
def test_second_derivatives_at_exactly_zero_are_the_variance(name: str) -> None:
    """Where learned weights or states start: no branch at 0 may swallow the curvature."""
    prior, t = SCALAR[name], torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(prior.token_value(t), t, create_graph=True)
    torch.testing.assert_close(slope, prior.activation(t), rtol=0, atol=1e-15)
    variance = prior.hessian_product(t, torch.ones_like(t)).detach()
    if slope.requires_grad:
        (curvature,) = torch.autograd.grad(slope.sum(), t, allow_unused=True)
        curvature = torch.zeros_like(t) if curvature is None else curvature
        torch.testing.assert_close(curvature, variance, rtol=0, atol=1e-15)
    else:
        assert name == "constant" and not variance.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ising_units_at_all_sizes_of_the_field(dtype: torch.dtype) -> None:
    sizes = torch.tensor([1e-30, 1e-8, 1e-3, 0.3, 1, 9, 29, 31, 80, 1e4, 1e30], dtype=dtype)
    t = torch.cat([-sizes, sizes]).requires_grad_()
    value = PRIORS["ising"].cumulant_function(t)  # type: ignore[attr-defined]
    assert torch.equal(*value.detach().chunk(2))
    expected = torch.logaddexp(sizes.double(), -sizes.double()) - math.log(2)
    close: Any = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(value[: len(sizes)], expected.to(dtype), **close)
    (slope,) = torch.autograd.grad(value.sum(), t, create_graph=True)
    torch.testing.assert_close(slope, t.tanh(), **close)
    (curvature,) = torch.autograd.grad(slope.sum(), t)
    torch.testing.assert_close(curvature, 1 - t.tanh().square(), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_poisson_units_in_strong_fields(dtype: torch.dtype) -> None:
    """Rates beyond the integers of the sampler are drawn by their normal limit, never negative."""
    for field in (18.0, 25.0, 44.0, 60.0):
        t = torch.full((20_000,), field, dtype=dtype)
        h = PRIORS["poisson"].sample(t, torch.Generator().manual_seed(0)).double()
        assert torch.equal(h, h.round()) and (h > 0).all()
        slack = 4 * math.exp(-field / 2) / math.sqrt(len(h)) + 2e-7
        assert abs((h.mean() / math.exp(field) - 1).item()) < slack
        if field < 20 or dtype == torch.float64:  # else finer than float32
            assert h.std().item() == pytest.approx(math.exp(field / 2), rel=0.03)
    beyond = PRIORS["poisson"].sample(torch.full((9,), 1e3, dtype=dtype))
    assert (beyond == math.inf).all()


@pytest.mark.parametrize("name", ["exponential", "laplace", "normal", "poisson"])
def test_samples_have_the_distribution_of_the_tilted_law(name: str) -> None:
    """The distribution function at several points, not its first moments alone."""
    t, draws = 0.5, 40_000
    points, weights = law(name)
    h = SCALAR[name].sample(torch.full((draws,), t).double(), torch.Generator().manual_seed(1))
    tilted = weights * (t * points).exp()
    for edge in (-1.5, -0.5, 0.5, 1.5, 3.5) if name != "normal" else ():
        share = (tilted[points <= edge].sum() / tilted.sum()).item()
        slack = 4.5 * math.sqrt(share * (1 - share) / draws) + 3e-3 * (name != "poisson")
        assert abs((h <= edge).double().mean().item() - share) <= slack
    if name == "normal":
        assert abs(((h - t) ** 4).mean().item() - 3) < 0.2


def test_one_hot_units() -> None:
    prior = OneHotPrior()
    t = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    states = torch.eye(3, dtype=torch.float64)
    weight = (states @ t).exp() / 3
    torch.testing.assert_close(prior.token_value(t), weight.sum().log())
    torch.testing.assert_close(prior.activation(t), (weight / weight.sum()) @ states)
    h = prior.sample(t.expand(40_000, 3), torch.Generator().manual_seed(0))
    assert torch.equal(h.sum(1), torch.ones(40_000).double()) and set(h.unique().tolist()) == {0, 1}
    assert (h.mean(0) - t.softmax(0)).abs().max() < 0.012

"""Restricted Boltzmann machines with their hidden units summed out, and the laws of hidden units."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from implicit_attn import DEQ
from implicit_attn.energies import (
    DenseAssociative,
    EffectiveRBM,
    Hopfield,
    IsingLagrangian,
    ReLULagrangian,
)
from implicit_attn.energies.effective import PRIORS, ScalarPrior
from solvers import SphericalSite, Tolerance

UNITS, DIM = 2, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


LAWS = {"ising": ([-1.0, 1.0], 0.5), "binary": ([0.0, 1.0], 0.5), "constant": ([1.0], 1.0)}


def summed_out(weights: Tensor, v: Tensor, name: str) -> Tensor:
    """``-log`` of the joint sum over all states of the hidden units, (B,)."""
    points, mass = LAWS[name]
    h = torch.tensor(list(itertools.product(points, repeat=len(weights))), dtype=torch.float64)
    return -torch.logsumexp(v @ weights.mT @ h.mT, dim=-1) - len(weights) * math.log(mass)


@pytest.mark.parametrize("name", LAWS)
def test_equals_the_sum_over_hidden_units(name: str) -> None:
    weights, v = draw(UNITS, DIM), draw(16, DIM, seed=1)
    energy = EffectiveRBM(weights, name)
    assert (energy(v) - summed_out(weights, v, name)).abs().max() <= 1e-12
    bias = draw(DIM, seed=2)
    full = EffectiveRBM(weights, name, visible="normal", bias=bias)
    extra = 0.5 * v.square().sum(1) - v @ bias
    assert (full(v) - summed_out(weights, v, name) - extra).abs().max() <= 1e-12


def test_vector_units_equal_their_sums() -> None:
    """One-hot units by enumeration; units on a sphere in three dimensions, Archimedes' integral."""
    weights, v = draw(2, 3, DIM), draw(16, DIM, seed=1)
    fields = torch.einsum("ukd,bd->buk", weights, v)
    states = itertools.product(torch.eye(3).double(), repeat=2)
    joint = [sum(fields[:, u] @ h for u, h in enumerate(state)) for state in states]
    enumerated = -torch.logsumexp(torch.stack(joint), 0) + math.log(9)  # type: ignore[arg-type]
    assert (EffectiveRBM(weights, "one-hot")(v) - enumerated).abs().max() <= 1e-12

    cosine, mass = (torch.from_numpy(t) for t in np.polynomial.legendre.leggauss(60))
    length = 1.5 * fields.norm(dim=-1, keepdim=True)
    on_sphere = -((length * cosine).exp() * mass / 2).sum(-1).log().sum(-1)
    energy = EffectiveRBM(weights, SphericalSite(radius=1.5))
    assert (energy(v) - on_sphere).abs().max() <= 1e-12


def test_equals_the_energies_that_have_a_name() -> None:
    weights, z = draw(5, DIM), draw(4, 6, DIM, seed=1)

    def same(energy: EffectiveRBM, value: Tensor, gradient: Tensor) -> None:
        torch.testing.assert_close(energy(z), value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(energy.grad(z), gradient, rtol=1e-12, atol=1e-12)

    dense = DenseAssociative(weights, power="exp")
    same(EffectiveRBM(weights, "poisson"), dense(z) + 6 * 5, dense.grad(z))  # 6 tokens, 5 units
    modern = Hopfield(weights)
    one_hot = EffectiveRBM(weights.unsqueeze(0), "one-hot", visible="normal")
    same(one_hot, modern(z) + 6 * math.log(5), modern.grad(z))
    ising = EffectiveRBM(weights, IsingLagrangian())
    named = EffectiveRBM(weights, "ising")
    same(named, ising(z) + 6 * 5 * math.log(2), ising.grad(z))


def test_a_domain_is_left_with_an_infinite_energy_and_no_gradient() -> None:
    energy = EffectiveRBM(torch.eye(2).double(), "exponential", visible="normal")
    z = torch.tensor([[0.2, 0.3], [0.2, 1.5], [1.0, 0.0]], dtype=torch.float64)
    value, gradient = energy.value_and_grad(z)
    assert value.isfinite().tolist() == [True, False, False]
    assert (value[1:] == -math.inf).all()
    assert gradient.isfinite().all(1).tolist() == [True, False, False]


def test_a_solver_stays_inside_the_domain() -> None:
    """``v = b + W^T K'(W v)``, with a barrier at about 2 and the wall at 2.5: whoever starts beyond the
    barrier slides towards the wall, where E has no minimum, and is not called converged."""
    weights = 0.4 * torch.eye(3, dtype=torch.float64)
    bias = torch.tensor([-0.2, 0.0, 0.3], dtype=torch.float64)
    energy = EffectiveRBM(weights, "exponential", visible="normal", bias=bias)
    layer = DEQ(energy, tolerance=Tolerance(rtol=1e-10), max_steps=200)
    starts = torch.tensor([[0.0, 0.0, 0.0], [1.8, -4.0, 1.0], [0.5, 2.4, -2.0]]).double()
    solution = layer.solve(starts, z0=starts, on_failure="ignore")
    assert solution.converged.tolist() == [True, True, False]
    assert (solution.value @ weights.mT < 1).all()
    assert energy(solution.value).isfinite().all()
    assert energy.grad(solution.value[:2]).abs().max() < 1e-8


@pytest.mark.parametrize(
    ("hidden", "shape", "options"),
    [
        ("normal", (3, 4), {}),
        ("poisson", (3, 4), {"scale": 0.25}),
        ("binary", (3, 4), {}),
        ("laplace", (3, 4), {"scale": 0.12}),
        ("one-hot", (2, 3, 4), {}),
        (SphericalSite(), (2, 2, 4), {"scale": 0.5}),
    ],
    ids=["normal", "poisson", "binary", "laplace", "one-hot", "sphere"],
)
def test_gibbs_samples_have_the_law_of_the_effective_energy(
    hidden: str | SphericalSite, shape: tuple[int, ...], options: dict[str, float]
) -> None:
    """Frequencies of the 16 states of 4 visible spins against ``exp(-E) / Z``."""
    weights, chains = options.get("scale", 0.4) * draw(*shape), 20_000
    energy = EffectiveRBM(weights, hidden, visible="ising", bias=0.3 * draw(4, seed=5))
    states = torch.tensor([*itertools.product([-1.0, 1.0], repeat=4)], dtype=torch.float64)
    exact = (-energy(states)).softmax(0)
    generator = torch.Generator().manual_seed(0)
    v = energy.gibbs(states[:1].expand(chains, 4), 15, generator)
    found = (v.unsqueeze(1) == states).all(-1).double().mean(0)
    error = (exact * (1 - exact) / chains).sqrt()
    assert found.sum() == pytest.approx(1)  # no other state
    assert ((found - exact).abs() <= 4 * error).all()


def test_gibbs_samples_of_real_units() -> None:
    """Normal units on both sides: a Gaussian with covariance ``(I - W^T W)^-1``."""
    weights, bias = 0.25 * draw(3, 3), draw(3, seed=5)
    energy = EffectiveRBM(weights, "normal", visible="normal", bias=bias)
    covariance = torch.linalg.inv(torch.eye(3) - weights.mT @ weights)
    v = energy.gibbs(torch.zeros(40_000, 3).double(), 25, torch.Generator().manual_seed(0))
    assert (v.mean(0) - covariance @ bias).abs().max() < 0.03
    assert (torch.cov(v.mT) - covariance).abs().max() < 0.05


def test_mistakes_of_samples() -> None:
    weights, spins = draw(3, 4), torch.ones(2, 4).double()
    ising = EffectiveRBM(weights, visible="ising")
    for bad, error, message in (
        (lambda: ising.gibbs(spins * math.nan, 1), ValueError, r"v must have the entries -1 and 1"),
        (lambda: ising.gibbs(spins[:, :3], 1), ValueError, r"v must have the shape \(\.\.\., 4\)"),
        (lambda: ising.gibbs(spins.float(), 1), TypeError, "v must be of the dtype of the weights"),
        (lambda: EffectiveRBM(draw(1, 1, 4), "one-hot"), ValueError, r"with components >= 2, got"),
    ):
        with pytest.raises(error, match=message):
            bad()


def test_mistakes() -> None:
    weights = draw(3, 4)
    for bad, error, message in (
        (lambda: EffectiveRBM(weights, SphericalSite()), ValueError, "d >= 2"),
        (lambda: EffectiveRBM(weights, "one-hot"), ValueError, "needs weights .units, components,"),
        (lambda: EffectiveRBM(weights, bias=torch.ones(3)), ValueError, "bias must have the shape"),
        (lambda: EffectiveRBM(weights).gibbs(torch.ones(1, 4).double(), 1), ValueError, "visible"),
        (
            lambda: EffectiveRBM(weights, ReLULagrangian()).sample_hidden(
                torch.ones(1, 4).double()
            ),
            TypeError,
            "hidden must have sample",
        ),
    ):
        with pytest.raises(error, match=message):
            bad()


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

"""Memories: modern Hopfield networks, queries among keys, Boltzmann machines without hidden units."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.autograd import gradcheck

from cases.energies import relative_error
from implicit_attn.energies import (
    AttentionInput,
    DenseAssociative,
    EffectiveRBM,
    Hopfield,
    IsingLagrangian,
    Quadratic,
    QueryEnergy,
    ReLULagrangian,
    SoftmaxAttention,
)
from implicit_attn.energies.memories import PRIORS, ScalarPrior
from solvers import SphericalSite

BATCH, HEADS, WIDTH, N, M = 2, 3, 2, 4, 5
DIM = HEADS * WIDTH
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def state_and_keys() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(BATCH, N + M, DIM, generator=generator, dtype=torch.float64)
    return numbers[:, :N], numbers[:, N:]


def inputs() -> dict[str, AttentionInput]:
    generator = torch.Generator().manual_seed(1)
    _, keys = state_and_keys()
    seen = torch.rand(BATCH, M, generator=generator) < 0.6
    seen[0] = False  # a sample without any key
    pairs = torch.rand(BATCH, HEADS, N, M, generator=generator) < 0.5
    bias = torch.randn(BATCH, HEADS, N, M, generator=generator, dtype=torch.float64)
    return {
        "all": AttentionInput(memory=keys),
        "masked": AttentionInput(memory=keys, memory_mask=seen),
        "one pattern": AttentionInput(memory=keys, pairs=pairs[0, 0]),
        "pattern a sample": AttentionInput(memory=keys, pairs=pairs[:, 0], memory_mask=seen),
        "biased": AttentionInput(memory=keys, pairs=pairs, pair_bias=bias),
    }


@pytest.mark.parametrize("name", inputs())
def test_queries_are_softmax_attention_with_identities_for_its_weights(name: str) -> None:
    z, x = state_and_keys()[0], inputs()[name]._replace(tokens=torch.zeros(BATCH, N, DIM).double())
    attention = SoftmaxAttention(DIM, HEADS, cross=True, norm=None, beta=0.7).double()
    torch.nn.init.eye_(attention.query.weight)
    torch.nn.init.eye_(attention.key.weight)
    expected = (attention + Quadratic().select("tokens")).value_and_grad(z, x)
    energy = QueryEnergy(DIM, HEADS, beta=0.7)
    for found, right in zip(energy.value_and_grad(z, x), expected, strict=True):
        torch.testing.assert_close(found, right, **EXACT)
    torch.testing.assert_close(energy.each(z, x).sum((1, 2)), expected[0], **EXACT)


def test_stored_patterns() -> None:
    z, patterns, bias = draw(2, 4, 6), draw(5, 6, seed=1), draw(6, seed=2)
    overlaps, size = z @ patterns.mT, 0.5 * z.square().sum(-1)
    for energy, value in (
        (Hopfield(patterns, beta=BETA), size - (BETA * overlaps).logsumexp(-1) / BETA),
        (EffectiveRBM(patterns, bias=-bias), -0.5 * overlaps.square().sum(-1) + z @ bias),
        *((DenseAssociative(patterns, power=p), -overlaps.pow(p).sum(-1)) for p in (2, 3, 4)),
        (DenseAssociative(patterns, power="exp", shift=2.0), -(overlaps - 2).exp().sum(-1)),
    ):
        torch.testing.assert_close(energy(z), value.sum(1), **EXACT)


BETA = 1.7
each_temperature = pytest.mark.parametrize("cooling", [1, 2])


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def grid(reach: float = 8.0, count: int = 401) -> tuple[Tensor, float]:
    """Points (G, 2) and the area of each: the trapezoidal rule, exact to rounding for Gaussians."""
    line = torch.linspace(-reach, reach, count, dtype=torch.float64)
    return torch.cartesian_prod(line, line), (2 * reach / (count - 1)) ** 2


def with_patterns(patterns: Tensor) -> Hopfield:
    memory = Hopfield(patterns, beta=BETA)
    memory.patterns = patterns  # with its graph
    return memory


@each_temperature
def test_likelihood_and_normaliser_pass_gradcheck(cooling: int) -> None:
    patterns, z = draw(3, 2).requires_grad_(), draw(4, 2, seed=1).requires_grad_()
    assert gradcheck(lambda p: with_patterns(p).log_partition(cooling), patterns)
    assert gradcheck(lambda p, z: with_patterns(p).log_prob(z, cooling), (patterns, z))


@each_temperature
def test_samples_have_the_moments_of_the_density(cooling: int) -> None:
    memory = Hopfield(draw(4, 2), beta=BETA)
    points, area = grid()
    mass = memory.log_prob(points, cooling).exp() * area
    z = memory.sample(40_000, torch.Generator().manual_seed(0), cooling)
    assert z.shape == (40_000, 2) and z.dtype == torch.float64
    for power in (
        lambda p: p,
        lambda p: p.square(),
        lambda p: p.prod(-1, keepdim=True),
        lambda p: (p > 0.5).double(),
        lambda p: p**3,
    ):
        values = power(z)
        exact = (mass.unsqueeze(-1) * power(points)).sum(0)
        error = values.std(0) / math.sqrt(len(z))
        assert ((values.mean(0) - exact).abs() <= 4 * error + 0.01 * area**0.5).all()


VISIBLE_DIM = 3
STATES = {"ising": ([-1.0, 1.0], 0.5), "binary": ([0.0, 1.0], 0.5), "constant": ([1.0], 1.0)}


@pytest.mark.parametrize("name", STATES)
def test_equals_the_sum_over_hidden_units(name: str) -> None:
    weights, v, bias = (
        draw(2, VISIBLE_DIM),
        draw(16, VISIBLE_DIM, seed=1),
        draw(VISIBLE_DIM, seed=2),
    )
    points, mass = STATES[name]
    h = torch.tensor(list(itertools.product(points, repeat=2)), dtype=torch.float64)
    summed = -torch.logsumexp(v @ weights.mT @ h.mT, dim=-1) - 2 * math.log(mass)
    assert (EffectiveRBM(weights, name)(v) - summed).abs().max() <= 1e-12
    full = EffectiveRBM(weights, name, visible="normal", bias=bias)
    extra = 0.5 * v.square().sum(1) - v @ bias
    assert (full(v) - summed - extra).abs().max() <= 1e-12


def test_equals_the_energies_that_have_a_name() -> None:
    weights, z = draw(5, VISIBLE_DIM), draw(4, 6, VISIBLE_DIM, seed=1)

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


PLAIN, ISING = EffectiveRBM(draw(3, 4)), EffectiveRBM(draw(3, 4), visible="ising")
RELU, SPINS = EffectiveRBM(draw(3, 4), ReLULagrangian()), torch.ones(2, 4).double()
FORTY, KEYS = Hopfield(draw(40, 2)), torch.zeros(2, M, DIM)
FEW = AttentionInput(memory=KEYS.double(), pairs=torch.ones(2, 3, 3, 3).bool())
MISTAKES: list[tuple[Any, type[Exception], str]] = [
    (lambda: ask(None), TypeError, r"\bx\b"),
    (lambda: ask(KEYS), TypeError, r"\bx\b"),
    (lambda: ask(AttentionInput()), TypeError, r"\bx\b"),
    (lambda: ask(FEW), ValueError, "pairs"),
    (lambda: FORTY.log_partition(6), ValueError, "cooling"),
    (lambda: FORTY.log_prob(draw(3, 3)), ValueError, r"\bz\b"),
    (lambda: ISING.gibbs(SPINS * math.nan, 1), ValueError, r"\bv\b"),
    (lambda: ISING.gibbs(SPINS.float(), 1), ValueError, r"\bv\b"),
    (lambda: PLAIN.gibbs(SPINS, 1), ValueError, "visible"),
    (lambda: RELU.sample_hidden(SPINS), TypeError, "hidden"),
    (lambda: EffectiveRBM(draw(3, 4), "one-hot"), ValueError, "weights"),
    (lambda: EffectiveRBM(draw(3, 4), SphericalSite()), ValueError, r"\bd\b"),
    (lambda: EffectiveRBM(draw(3, 4), 3), TypeError, "hidden"),  # type: ignore[arg-type]
    (lambda: EffectiveRBM(draw(3, 4), bias=torch.ones(3)), ValueError, "bias"),
]


def ask(x: Any) -> Tensor:
    return QueryEnergy(DIM, HEADS)(state_and_keys()[0], x)


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES)
def test_mistakes(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


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
    elif name in STATES:
        points, weights = np.array(STATES[name][0]), np.full(len(STATES[name][0]), STATES[name][1])
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
    t = torch.zeros(3, dtype=torch.float64, requires_grad=True)  # where learned weights may start
    (slope,) = torch.autograd.grad(prior.token_value(t), t, create_graph=True)
    curvature = prior.hessian_product(t, torch.ones_like(t)).detach()
    if slope.requires_grad:
        (found,) = torch.autograd.grad(slope.sum(), t, materialize_grads=True)
        torch.testing.assert_close(found, curvature, rtol=0, atol=1e-15)
    else:
        assert name == "constant" and not curvature.any()


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
    with pytest.raises(ValueError, match="field"):
        prior.sample(t.detach())


@pytest.mark.parametrize("name", ["exponential", "laplace", "poisson"])
def test_samples_have_the_distribution_of_the_tilted_law(name: str) -> None:
    """The distribution function at several points, not its first moments alone."""
    t, draws = 0.5, 40_000
    points, weights = law(name)
    h = SCALAR[name].sample(torch.full((draws,), t).double(), torch.Generator().manual_seed(1))
    tilted = weights * (t * points).exp()
    for edge in (-1.5, -0.5, 0.5, 1.5, 3.5):
        share = (tilted[points <= edge].sum() / tilted.sum()).item()
        slack = 4.5 * math.sqrt(share * (1 - share) / draws) + 3e-3 * (name != "poisson")
        assert abs((h <= edge).double().mean().item() - share) <= slack


@pytest.mark.parametrize("kind", [Hopfield, DenseAssociative, EffectiveRBM])
def test_patterns_that_are_columns_of_a_matrix_can_be_saved(kind: Any, tmp_path: Path) -> None:
    patterns = torch.randn(5, 8).T
    assert not patterns.is_contiguous()
    for learnable in (False, True):
        energy = kind(patterns, learnable=learnable)
        safetensors.torch.save_file(energy.state_dict(), tmp_path / "energy.safetensors")
        kept = safetensors.torch.load_file(tmp_path / "energy.safetensors")
        assert torch.equal(kept["patterns"], patterns)


def test_scores_beyond_half_precision() -> None:
    """At beta = 1e5 the scores exceed the largest number of float16, 65504."""
    torch.manual_seed(0)
    patterns, z = torch.randn(6, 64), torch.randn(2, 5, 64)
    energy, exact = Hopfield(patterns, beta=1e5).half(), Hopfield(patterns.double(), beta=1e5)
    expected = exact.value_and_grad(z.half().double())
    for result, reference in zip(energy.value_and_grad(z.half()), expected, strict=True):
        assert relative_error(result, reference) <= 5e-3

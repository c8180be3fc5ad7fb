"""The continuous memory as a density: normaliser, likelihood, samples, score."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from implicit_attn.energies import Hopfield
from implicit_attn.energies.hopfield import LARGEST_MIXTURE

BETA = 1.7
each_temperature = pytest.mark.parametrize("cooling", [1, 2, 3])


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def grid(reach: float = 8.0, count: int = 401) -> tuple[Tensor, float]:
    """Points (G, 2) and the area of each: the trapezoidal rule, exact to rounding for Gaussians."""
    line = torch.linspace(-reach, reach, count, dtype=torch.float64)
    return torch.cartesian_prod(line, line), (2 * reach / (count - 1)) ** 2


@each_temperature
def test_the_density_integrates_to_one(cooling: int) -> None:
    memory = Hopfield(draw(4, 2), beta=BETA)
    points, area = grid()
    assert abs(memory.log_prob(points, cooling).exp().sum().item() * area - 1) <= 1e-10
    # And it is that of the energy, one token a sample.
    energies = memory(points)
    integral = (-cooling * BETA * energies).exp().sum() * area
    assert abs(integral.log().item() - memory.log_partition(cooling).item()) <= 1e-10
    shift = memory.log_prob(points, cooling) + cooling * BETA * energies
    torch.testing.assert_close(shift, -memory.log_partition(cooling).expand_as(shift))


@each_temperature
def test_the_density_is_a_mixture_over_means_of_patterns(cooling: int) -> None:
    """Against the sum over all ordered tuples, Gaussian by Gaussian."""
    patterns, z = draw(4, 3), draw(5, 6, 3, seed=1)
    precision = cooling * BETA
    terms, weights = [], []
    for members in itertools.product(patterns, repeat=cooling):
        center = sum(members) / cooling
        assert isinstance(center, Tensor)
        weights.append(precision / 2 * center.square().sum())
        terms.append(-precision / 2 * (z - center).square().sum(-1))
    log_weights = torch.stack(weights).log_softmax(0)
    volume = 3 / 2 * math.log(2 * math.pi / precision)
    expected = torch.logsumexp(torch.stack(terms, -1) + log_weights, -1) - volume
    found = Hopfield(patterns, beta=BETA).log_prob(z, cooling)
    assert found.shape == (5, 6)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_unit_step_is_the_mean_of_the_pattern_behind_a_noisy_state() -> None:
    """By Tweedie's formula, and by Bayes' with the weights of the patterns."""
    patterns, z = draw(6, 3), draw(8, 3, seed=1).requires_grad_()
    memory = Hopfield(patterns, beta=BETA)
    (score,) = torch.autograd.grad(memory.log_prob(z).sum(), z)
    z = z.detach()
    step = z - memory.grad(z)
    torch.testing.assert_close(z + score / BETA, step, rtol=1e-12, atol=1e-12)
    prior = (BETA / 2 * patterns.square().sum(1)).softmax(0)
    likelihood = (-BETA / 2 * (z.unsqueeze(1) - patterns).square().sum(-1)).exp()
    posterior = prior * likelihood
    mean = posterior / posterior.sum(1, keepdim=True) @ patterns
    torch.testing.assert_close(step, mean, rtol=1e-12, atol=1e-12)


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


@each_temperature
def test_float32_does_not_cancel_large_norms(cooling: int) -> None:
    """Grey values from 0 to 255: ``beta |x|^2 / 2`` is above 10^5, of which little is left."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(256, (12, 100), generator=generator).float()
    z = patterns[:6] + 5 * torch.randn(6, 100, generator=generator)
    found = Hopfield(patterns, beta=0.04).log_prob(z, cooling)
    exact = Hopfield(patterns.double(), beta=0.04).log_prob(z.double(), cooling)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=3e-7, atol=1e-6)
    assert Hopfield(patterns).log_prob(z.double()).dtype == torch.float64


def test_mistakes() -> None:
    memory = Hopfield(draw(40, 2))
    assert math.comb(40 + 5, 6) > LARGEST_MIXTURE
    for bad, error, message in (
        (lambda: memory.log_partition(6), ValueError, "cooling=6 with 40 patterns makes"),
        (lambda: memory.log_prob(draw(3, 3)), ValueError, r"z must be a floating tensor"),
    ):
        with pytest.raises(error, match=message):
            bad()

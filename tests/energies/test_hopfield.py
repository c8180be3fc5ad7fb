"""Queries among keys that stay: Hopfield energies, attention as their descent, densities of memories."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from cases.energies import relative_error
from implicit_attn.energies import (
    AttentionInput,
    Hopfield,
    Quadratic,
    QueryEnergy,
    SoftmaxAttention,
)
from implicit_attn.energies.hopfield import LARGEST_MIXTURE

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


def by_loop(z: Tensor, x: AttentionInput, beta: float) -> Tensor:
    """The energy of each query (B, H, N), one after the other."""
    assert x.memory is not None
    found = torch.zeros(BATCH, HEADS, N, dtype=torch.float64)
    for b in range(BATCH):
        for h in range(HEADS):
            part = slice(h * WIDTH, (h + 1) * WIDTH)
            for i in range(N):
                query, allowed = z[b, i, part], torch.ones(M, dtype=torch.bool)
                scores = beta * x.memory[b, :, part] @ query
                if x.memory_mask is not None:
                    allowed = allowed & x.memory_mask[b]
                if x.pairs is not None:
                    sizes = (BATCH, HEADS, N, M)
                    pairs = x.pairs[:, None] if x.pairs.dim() == 3 else x.pairs
                    allowed = allowed & pairs.expand(sizes)[b, h, i]
                if x.pair_bias is not None:
                    scores = scores + x.pair_bias[b, h, i]
                lse = scores[allowed].logsumexp(0) if allowed.any() else query.new_zeros(())
                found[b, h, i] = 0.5 * query @ query - lse / beta
    return found


@pytest.mark.parametrize("name", inputs())
def test_formula(name: str) -> None:
    """Against a loop and its automatic gradient."""
    x = inputs()[name]
    z = state_and_keys()[0].requires_grad_()
    expected = by_loop(z, x, 0.7)
    (gradient,) = torch.autograd.grad(expected.sum(), z)
    energy = QueryEnergy(DIM, HEADS, beta=0.7)
    value, found = energy.value_and_grad(z, x)
    torch.testing.assert_close(value, expected.sum((1, 2)), **EXACT)
    torch.testing.assert_close(found, gradient, **EXACT)
    torch.testing.assert_close(energy.each(z, x), expected, **EXACT)


def test_softmax_attention_is_such_an_energy() -> None:
    """With identities for its weights, and the quadratic at 0."""
    z, keys = state_and_keys()
    attention = SoftmaxAttention(DIM, HEADS, cross=True, norm=None, beta=0.7).double()
    torch.nn.init.eye_(attention.query.weight)
    torch.nn.init.eye_(attention.key.weight)
    x = AttentionInput(tokens=torch.zeros_like(z), memory=keys)
    energy = attention + Quadratic().select("tokens")
    expected = QueryEnergy(DIM, HEADS, beta=0.7).value_and_grad(z, x)
    for found, right in zip(energy.value_and_grad(z, x), expected, strict=True):
        torch.testing.assert_close(found, right, **EXACT)


def test_a_temperature_for_each_head_is_that_head_alone() -> None:
    z, keys = state_and_keys()
    betas = (0.3, 1.0, 2.5)
    parts = [
        QueryEnergy(WIDTH, beta=beta).each(z_h.contiguous(), k_h.contiguous())
        for beta, z_h, k_h in zip(betas, z.split(WIDTH, -1), keys.split(WIDTH, -1), strict=True)
    ]
    energy = QueryEnergy(DIM, HEADS, beta=betas).double()
    torch.testing.assert_close(energy.each(z, keys), torch.cat(parts, 1), **EXACT)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (None, TypeError, r"QueryEnergy: x must be a tensor \(B, M, 6\)"),
        (torch.zeros(2, M, 5).double(), ValueError, r"x must have the shape \(B, M, 6\), got"),
        (torch.zeros(2, M, DIM), TypeError, r"x must be of torch.float64 on cpu like z"),
        (AttentionInput(), TypeError, r"got NoneType"),
        (
            AttentionInput(
                memory=torch.zeros(2, M, DIM).double(), pairs=torch.ones(2, 3, 3, 3).bool()
            ),
            ValueError,
            r"pairs must have the shape \(4, 5\)",
        ),
    ],
)
def test_errors_of_inputs(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        QueryEnergy(DIM, HEADS)(state_and_keys()[0], x)


def test_errors_of_arguments() -> None:
    with pytest.raises(ValueError, match="heads"):
        QueryEnergy(DIM, 4)


FREE_DIM, FREE_HEADS, FREE_WIDTH = 6, 2, 3
KINDS = ("inner", "elastic")


def make(kind: str, seed: int = 0, heads: int = FREE_HEADS, **options: object) -> SoftmaxAttention:
    torch.manual_seed(seed)
    options = {"energy": kind, "cross": True, "norm": None, "beta": 0.7} | options
    return SoftmaxAttention(FREE_DIM, heads, head_dim=FREE_WIDTH, **options).double()  # type: ignore[arg-type]


def drawn(seed: int, queries: int = 1, keys: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(1, queries, FREE_DIM, generator=generator, dtype=torch.float64)
    return z, torch.randn(1, keys, FREE_DIM, generator=generator, dtype=torch.float64)


def single(kind: str, beta: float, keys: Tensor) -> tuple[SoftmaxAttention, Tensor]:
    """One head whose queries are the tokens themselves, and whose keys are ``keys`` (M, p)."""
    width = keys.shape[1]
    energy = SoftmaxAttention(width, 1, energy=kind, cross=True, norm=None, beta=beta).double()
    with torch.no_grad():
        energy.query.weight.copy_(torch.eye(width))
        energy.key.weight.copy_(torch.eye(width))
    return energy, keys[None]


def least_curvatures(energy: SoftmaxAttention, points: Tensor, x: Tensor) -> Tensor:
    """The least eigenvalue of each point's own Hessian; ``points`` (N, p)."""
    z, width = points[None], points.shape[1]
    columns = [energy.hvp(z, v.expand_as(z), x)[0] for v in torch.eye(width).double()]
    return torch.linalg.eigvalsh(torch.stack(columns, -1).detach())[:, 0]


def test_the_elastic_energy_is_convex_above_a_quarter_of_the_squared_diameter() -> None:
    """No covariance of points exceeds that (Popoviciu); a quarter of that temperature is too cold."""
    generator = torch.Generator().manual_seed(6)
    keys = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    points = 2.0 * torch.randn(2000, 3, generator=generator, dtype=torch.float64)
    quarter = 0.25 * torch.cdist(keys, keys).max().item() ** 2
    energy, x = single("elastic", 1.0 / quarter, keys)
    assert least_curvatures(energy, points, x).min() >= -1e-12
    energy, x = single("elastic", 4.0 / quarter, keys)
    assert least_curvatures(energy, points, x).min() < 0.0


@pytest.mark.parametrize("temperature", [0.5, 0.99, 1.0, 1.01, 2.0])
def test_the_bound_is_sharp_for_two_keys(temperature: float) -> None:
    """Between keys ``+a`` and ``-a`` the curvature along a is ``1 - |a|^2 / T``."""
    a = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    energy, x = single("elastic", 1.0 / temperature, torch.cat((a, -a)))
    z = torch.zeros(1, 1, 2, dtype=torch.float64)
    curvature = (energy.hvp(z, a[None], x) * a).sum().item()
    assert curvature == pytest.approx(1.0 - 1.0 / temperature, abs=1e-12)
    assert least_curvatures(energy, z[0], x).item() == pytest.approx(curvature, abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "eta"),
    [("inner", 0.1), ("inner", 1.0), ("inner", 1000.0), ("elastic", 1.0), ("elastic", 1.9)],
)
def test_how_far_a_gradient_step_descends(kind: str, eta: float) -> None:
    """Inner: at least ``eta |g|^2`` for every eta; elastic: ``eta (1 - eta L / 2) |g|^2``.

    L is the largest eigenvalue of ``sum_h W_h^T W_h``: one where the queries are the tokens.
    """
    for seed in range(20):
        if seed % 2:
            generator = torch.Generator().manual_seed(seed)
            keys = torch.randn(5, FREE_DIM, generator=generator, dtype=torch.float64)
            energy, x = single(kind, 0.7, keys)
        else:
            energy = make(kind, seed)
            if kind == "elastic":
                with torch.no_grad():
                    energy.query.weight /= torch.linalg.matrix_norm(energy.query.weight, ord=2)
            _, x = drawn(seed)
        z, _ = drawn(seed)
        value, gradient = energy.value_and_grad(z, x)
        promised = eta if kind == "inner" else eta * (1.0 - 0.5 * eta)
        lower = energy(z - eta * gradient, x)
        slack = 1e-9 * value.abs().clamp_min(1.0)
        assert (lower <= value - promised * gradient.square().sum() + slack).all()


def test_distances_and_products_agree_for_keys_of_one_norm() -> None:
    """``F_elastic = F_inner + |z|^2/2 + rho^2/2``, so the weights agree and the gradients up to z."""
    generator = torch.Generator().manual_seed(8)
    keys = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    keys = 1.3 * keys / keys.norm(dim=1, keepdim=True)
    z = torch.randn(1, 3, 4, generator=generator, dtype=torch.float64)
    found = {kind: single(kind, 0.7, keys) for kind in KINDS}
    value, gradient = zip(*(e.value_and_grad(z, x) for e, x in found.values()), strict=True)
    shift = 0.5 * z.square().sum() + 3 * 0.5 * 1.3**2
    assert relative_error(value[1].detach(), (value[0] + shift).detach()) <= 1e-13
    assert relative_error(gradient[1].detach(), (gradient[0] + z).detach()) <= 1e-13


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

"""Draws from single sites and Gibbs sampling of coupled ones, against exact moments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.spin_models import (
    as_matrix,
    couplings,
    enumerate_moments,
    fields,
    generator,
    potts_states,
)
from solvers import GaussianSite, IsingSite, PottsSite, Site, SphericalSite, TorusSite, gibbs

F64 = torch.float64
CHAINS = 4_000
ERRORS = 4.5  # standard errors of a mean that are allowed


class OtherPotts(PottsSite):
    """Potts sites that are sampled by matrix products."""


def assert_moments(samples: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Mean (n,) and covariance (n, n) of samples (K, n), each within its own standard errors."""
    assert samples.isfinite().all()
    around = samples - mean
    products = around.unsqueeze(-1) * around.unsqueeze(-2)
    for got, wanted in ((samples, mean), (products, covariance)):
        error = (got.mean(0) - wanted).abs()
        allowed = ERRORS * got.std(0) / math.sqrt(len(samples)) + 1e-6
        assert (error <= allowed).all(), (error / allowed).max()


def gaussian(dim: int, sites: int | None = None) -> GaussianSite:
    shape = (dim, dim) if sites is None else (sites, dim, dim)
    half = torch.randn(*shape, generator=generator(5), dtype=F64)
    return GaussianSite(half @ half.mT / dim + 0.5 * torch.eye(dim, dtype=F64))


SITES: dict[str, tuple[Site, int]] = {
    "ising": (IsingSite(), 1),
    "potts": (PottsSite(), 3),
    "gaussian": (gaussian(3), 3),
    "gaussian each": (gaussian(2, 3), 2),
    "sphere": (SphericalSite(), 3),
    "sphere in 20 dimensions": (SphericalSite(), 20),
}


@pytest.mark.parametrize("name", SITES)
def test_draws_have_the_moments_of_the_site(name: str) -> None:
    site, dim = SITES[name]
    field = torch.randn(3, dim, generator=generator(1), dtype=F64)
    field[1] *= 3.0
    mean, covariance = site.moments(field[None], torch.zeros(1, 3, dim, dim, dtype=F64))
    drawn = site.sample(field.expand(CHAINS, 3, dim), generator(3))
    assert drawn.shape == (CHAINS, 3, dim) and drawn.dtype == F64 and not drawn.requires_grad
    for i in range(3):
        assert_moments(drawn[:, i], mean[0, i], covariance[0, i])


def test_a_state_without_weight_is_never_drawn() -> None:
    field = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(CHAINS, 1, 5)
    counts = PottsSite().sample(field, generator(0)).sum((0, 1))
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0] and (counts[[1, 3]] > 0.45 * CHAINS).all()


def test_a_site_without_sampler_says_so() -> None:
    class Bare(Site):
        def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
            return field.square().sum(-1)

    with pytest.raises(NotImplementedError, match="Bare cannot draw samples"):
        gibbs(
            couplings(2, 2, 0.1, generator(0)), torch.zeros(2, 2, dtype=F64), site=Bare(), sweeps=1
        )


# --- coupled sites ---------------------------------------------------------------------------------


def sample(blocks: Tensor, field: Tensor, site: Site, seed: int = 0, **options: Any) -> Tensor:
    options = {"sweeps": 20, "chains": CHAINS} | options
    return gibbs(blocks, field, site=site, generator=generator(seed), **options)


@pytest.mark.parametrize("site", [PottsSite(), OtherPotts()], ids=["looked up", "multiplied"])
def test_potts_sites_against_enumeration(site: Site) -> None:
    blocks = couplings(4, 3, 0.8, generator(0))
    blocks[0, 3] = blocks[3, 0] = 0.0  # not all pairs are coupled
    field = fields(1, 4, 3, generator(1))[0]
    exact = enumerate_moments(potts_states(4, 3), blocks, field)
    assert_moments(sample(blocks, field, site).flatten(1), *exact)


@pytest.mark.parametrize("each", [False, True])
def test_gaussian_sites_against_the_inverse(each: bool) -> None:
    site = gaussian(2, 3 if each else None)
    blocks, field = couplings(3, 2, 0.2, generator(0)), fields(1, 3, 2, generator(1))[0]
    precision = torch.block_diag(*torch.linalg.inv(site.sigma).expand(3, 2, 2))
    covariance = torch.linalg.inv(precision - as_matrix(blocks))
    mean = covariance @ field.flatten()
    assert_moments(sample(blocks, field, site).flatten(1), mean, covariance)
    with pytest.raises(ValueError, match="couplings are too strong"):
        sample(20 * blocks, field, site)


def test_two_coupled_spheres() -> None:
    blocks = torch.zeros(2, 2, 3, 3, dtype=F64)
    blocks[0, 1] = blocks[1, 0] = 0.5 * torch.eye(3, dtype=F64)
    spins = sample(blocks, torch.zeros(2, 3, dtype=F64), SphericalSite(), sweeps=40)
    cosine = (spins[:, 0] * spins[:, 1]).sum(-1) / 3
    wanted = 1 / math.tanh(1.5) - 1 / 1.5  # Langevin's function of K |S|^2
    assert (cosine.mean() - wanted).abs() < ERRORS * cosine.std() / math.sqrt(CHAINS)


@pytest.mark.parametrize("site", [PottsSite(), OtherPotts()], ids=["looked up", "multiplied"])
def test_clamped_sites_keep_their_values_and_act_on_the_others(site: Site) -> None:
    blocks = couplings(4, 3, 0.8, generator(0))
    field = fields(1, 4, 3, generator(1))[0]
    states = potts_states(4, 3)
    values = torch.full((CHAINS, 4, 3), torch.nan, dtype=F64)
    clamped = torch.zeros(CHAINS, 4, dtype=torch.bool)
    half = CHAINS // 2  # other sites at other values in the second half of the chains
    clues = ((slice(0, half), 1, 2), (slice(half, CHAINS), 3, 0))
    for part, place, colour in clues:
        values[part, place] = torch.eye(3, dtype=F64)[colour]
        clamped[part, place] = True
    spins = sample(blocks, field, site, given=(values, clamped))
    for part, place, colour in clues:
        allowed = states[states[:, 3 * place + colour] == 1]
        assert_moments(spins[part].flatten(1), *enumerate_moments(allowed, blocks, field))


DOMAINS: list[tuple[Site, list[float], list[float], str]] = [
    (IsingSite(), [-1.0], [0.25], r"\+1 or -1 for IsingSite, got \[0.25\]"),
    (PottsSite(), [0.0, 1.0], [0.5, 0.5], r"one-hot for PottsSite, got \[0.5, 0.5\]"),
    (SphericalSite(), [1.0, 1.0], [1.0, 0.0], "of length radius"),
    (SphericalSite(3.0), [0.0, -3.0], [1.0, 1.0], "of length radius"),
    (TorusSite(), [0.6, 0.8, 0.0, 1.0], [1.2, 0.8, 0.0, 1.0], "of length 1 on every circle"),
]


@pytest.mark.parametrize(("site", "right", "wrong", "words"), DOMAINS)
@pytest.mark.parametrize("dtype", [F64, torch.bfloat16])
def test_states_must_be_values_of_the_site(
    site: Site, right: list[float], wrong: list[float], words: str, dtype: torch.dtype
) -> None:
    dim = len(right)
    blocks, field = torch.zeros(2, 2, dim, dim, dtype=dtype), torch.zeros(2, dim, dtype=dtype)
    good, bad = (torch.tensor(value, dtype=dtype).expand(2, dim) for value in (right, wrong))
    clamped = torch.tensor([True, False])
    drawn = gibbs(blocks, field, site=site, sweeps=1, start=good[None], given=(good, clamped))
    assert torch.equal(drawn[0, 0], good[0]) and site.takes(drawn).all()
    gibbs(blocks, field, site=site, sweeps=1, start=drawn)
    with pytest.raises(ValueError, match="start must be " + words):
        gibbs(blocks, field, site=site, sweeps=1, start=bad[None])
    with pytest.raises(ValueError, match="given must be " + words):
        gibbs(blocks, field, site=site, sweeps=1, given=(bad, clamped))
    gibbs(blocks, field, site=site, sweeps=1, given=(bad, ~clamped & clamped))  # no one is clamped


def test_chains_go_on_from_a_start_and_have_fields_of_their_own() -> None:
    blocks = torch.zeros(3, 3, 1, 1, dtype=F64)
    blocks[0, 1] = blocks[1, 0] = blocks[1, 2] = blocks[2, 1] = 50.0
    start = torch.tensor([1.0, -1.0]).double().view(2, 1, 1).expand(2, 3, 1)
    again = sample(blocks, torch.zeros(3, 1, dtype=F64), IsingSite(), chains=None, start=start)
    assert torch.equal(again, start)
    field = 50 * start
    assert torch.equal(sample(0 * blocks, field, IsingSite(), chains=None), start)


def test_draws_come_from_the_generator_alone() -> None:
    blocks, field = couplings(3, 2, 0.5, generator(0)), fields(1, 3, 2, generator(1))
    state = torch.random.get_rng_state()
    first, second, other = (
        sample(blocks, field, PottsSite(), seed, chains=9) for seed in (4, 4, 5)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)
    single = sample(blocks.float(), field.float(), PottsSite(), chains=9)
    assert single.dtype == torch.float32


J, X = torch.zeros(3, 3, 2, 2), torch.zeros(3, 2)
VALUES, CLAMPED = torch.full((3, 2), 0.5), torch.tensor([True, False, False])
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"site": "potts"}, TypeError, "site must be"),
    ({"sweeps": 0}, ValueError, "sweeps must be >= 1"),
    ({"field": X[:2]}, ValueError, "couplings must have the shape"),
    ({"field": X.expand(4, 3, 2)}, ValueError, "field must be one for all or for 2 chains"),
    ({"start": X.expand(2, 3, 2)}, ValueError, "start must be one-hot"),
    ({"start": X.expand(2, 3, 2) + math.nan}, ValueError, "start must be finite"),
    ({"start": (torch.rand(500, 2),)}, TypeError, "start must be a tensor or None"),
    ({"given": VALUES}, TypeError, "given must be a pair"),
    ({"given": (VALUES, CLAMPED)}, ValueError, "given must be one-hot"),
    ({"given": (VALUES, CLAMPED.float())}, TypeError, "given must hold floating values and a bool"),
    ({"given": (VALUES[:2], CLAMPED)}, ValueError, "given must hold values .* and bools"),
    ({"given": (VALUES, CLAMPED[:2])}, ValueError, "given must hold values .* and bools"),
    ({"given": (VALUES * math.nan, CLAMPED)}, ValueError, "given must hold finite values"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_errors_name_what_is_wrong(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    options: dict[str, Any] = {"couplings": J, "field": X, "site": PottsSite()}
    call: Callable[..., Tensor] = gibbs
    with pytest.raises(error, match=words):
        call(**({"sweeps": 1, "chains": 2} | options | change))

"""Enumeration of small spin models against loops and finite differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

import solvers
from implicit_attn.studies import SpinModel, exact_moments, random_ising, random_potts

Draw = Callable[[float, torch.Generator], SpinModel]

FAMILIES: dict[str, Draw] = {
    "one spin": lambda s, g: random_ising(1, s, g, samples=2),
    "ising": lambda s, g: random_ising(4, s, g, samples=2),
    "potts": lambda s, g: random_potts(3, 3, s, g, samples=2),
    "two states": lambda s, g: random_potts(4, 2, s, g, samples=3),
}


def drawn(family: str, strength: float = 1.3, seed: int = 0) -> SpinModel:
    return FAMILIES[family](strength, torch.Generator().manual_seed(seed))


def looped(model: SpinModel, sample: int) -> tuple[float, list[float], list[list[float]]]:
    """log Z, means and covariances in plain Python, one configuration after the other."""
    couplings, field = model.couplings.tolist(), model.field[sample].tolist()
    values = model.values.tolist()
    sites, dim = range(len(field)), range(len(values[0]))
    weights, spins = [], []
    for chosen in itertools.product(values, repeat=len(field)):
        exponent = sum(field[i][a] * chosen[i][a] for i in sites for a in dim)
        for i, j in itertools.combinations(sites, 2):
            exponent += sum(
                chosen[i][a] * couplings[i][j][a][b] * chosen[j][b] for a in dim for b in dim
            )
        weights.append(math.exp(exponent))
        spins.append([chosen[i][a] for i in sites for a in dim])
    total = math.fsum(weights)
    number = range(len(spins[0]))
    weights = [w / total for w in weights]
    mean = [math.fsum(w * s[k] for w, s in zip(weights, spins, strict=True)) for k in number]
    covariance = [
        [
            math.fsum(w * s[k] * s[m] for w, s in zip(weights, spins, strict=True))
            - mean[k] * mean[m]
            for m in number
        ]
        for k in number
    ]
    return math.log(total / len(spins)), mean, covariance


@pytest.mark.parametrize("family", FAMILIES)
def test_enumeration_against_loops(family: str) -> None:
    model = drawn(family)
    exact = exact_moments(model)
    batch, sites, dim = model.field.shape
    assert exact.mean.shape == (batch, sites, dim)
    assert exact.covariance.shape == (batch, sites, dim, sites, dim)
    for sample in range(batch):
        log_partition, mean, covariance = looped(model, sample)
        assert exact.log_partition[sample].item() == pytest.approx(log_partition, abs=1e-12)
        assert exact.mean[sample].flatten().tolist() == pytest.approx(mean, abs=1e-12)
        whole = exact.covariance[sample].reshape(sites * dim, sites * dim)
        for found, expected in zip(whole.tolist(), covariance, strict=True):
            assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_uncoupled_spins_are_the_site(family: str) -> None:
    """The site that goes with a model has its log-partition function, mean and covariance."""
    model = drawn(family, strength=0.0)
    exact = exact_moments(model)
    none = torch.zeros(*model.field.shape, model.field.shape[-1], dtype=torch.float64)
    alone = model.site.log_partition(model.field, none)
    torch.testing.assert_close(exact.log_partition, alone.sum(1))
    torch.testing.assert_close(exact.mean, model.site.mean(model.field, none))
    sites = model.field.shape[1]
    own = exact.covariance.diagonal(dim1=1, dim2=3).movedim(-1, 1)
    torch.testing.assert_close(own, model.site.covariance(model.field, none))
    others = exact.covariance * (1 - torch.eye(sites)[:, None, :, None])
    assert others.abs().max() < 1e-15


def test_strong_couplings_do_not_overflow() -> None:
    """Exponents of thousands: the most likely configuration is all there is."""
    model = drawn("ising", strength=2000.0)
    exact = exact_moments(model)
    for sample in range(2):
        best = max(
            torch.einsum("i,ij,j->", s, model.couplings[..., 0, 0], s).item() / 2
            + torch.dot(s, model.field[sample, :, 0]).item()
            for s in (
                torch.tensor(c, dtype=torch.float64)
                for c in itertools.product([1.0, -1.0], repeat=4)
            )
        )
        assert best > 800  # exp would overflow
        log_partition = exact.log_partition[sample].item() + 4 * math.log(2)
        # The global flip costs the fields alone, so that log Z may be up to log 2 larger.
        assert best <= log_partition <= best + math.log(2)
    assert all(torch.isfinite(tensor).all() for tensor in exact)


@pytest.mark.parametrize(("family", "dim"), [("ising", 1), ("potts", 3)])
def test_couplings_are_proper(family: str, dim: int) -> None:
    """Symmetric, without self-coupling, the same up to the strength for one seed."""
    model, stronger = drawn(family, 1.0), drawn(family, 2.5)
    couplings = model.couplings
    assert couplings.dtype == model.field.dtype == torch.float64
    assert torch.equal(couplings, couplings.permute(1, 0, 3, 2))
    assert torch.equal(couplings.diagonal(), torch.zeros(dim, dim, len(couplings)).double())
    torch.testing.assert_close(stronger.couplings, 2.5 * couplings)
    assert torch.equal(stronger.field, model.field)
    assert not torch.equal(drawn(family, 1.0, seed=1).couplings, couplings)


G = torch.Generator()
UNIT = torch.zeros(2, 2, 1, 1)
BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: random_ising(0, 1.0, G), "sites must be >= 1, got 0"),
    (lambda: random_ising(3, -1.0, G), "strength must be"),
    (lambda: random_potts(3, 1, 1.0, G), "states must be >= 2, got 1"),
    (lambda: exact_moments(random_ising(21, 1.0, G)), r"at most 1048576 .* got 2\^21"),
    (lambda: SpinModel(UNIT, torch.zeros(2, 1), torch.ones(2, 1), solvers.IsingSite()), "field"),
    (
        lambda: SpinModel(UNIT, torch.zeros(1, 3, 1), torch.ones(2, 1), solvers.IsingSite()),
        "couplings must be",
    ),
    (
        lambda: SpinModel(UNIT, torch.zeros(1, 2, 1), torch.ones(2, 3), solvers.IsingSite()),
        r"values must be \(K, 1\)",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

"""Random models of discrete spins, and their exact moments by enumeration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import solvers
from solvers.core.checks import require_count, require_nonnegative

MOST_CONFIGURATIONS = 2**20


@dataclass(frozen=True)
class SpinModel:
    """Discrete spins with ``P(S) ~ exp(1/2 sum_ij S_i^T J_ij S_j + sum_i x_i.S_i)``.

    Attributes:
        couplings: ``J`` (N, N, d, d).
        field: ``x`` (B, N, d), a field for each sample.
        values: (K, d), the values of a spin, each with the prior weight 1/K.
        site: the same single-spin prior for :func:`solvers.adaptive_tap`.
    """

    couplings: Tensor
    field: Tensor
    values: Tensor
    site: solvers.Site


class ExactMoments(NamedTuple):
    """Exact moments of a :class:`SpinModel`, float64."""

    log_partition: Tensor  # ``log Z`` (B,), with prior weights that sum to 1 on every site
    mean: Tensor  # ``<S_i>`` (B, N, d)
    covariance: Tensor  # ``<S_i S_j^T> - <S_i><S_j>^T``, (B, N, d, N, d)


def random_ising(
    sites: int,
    strength: float,
    generator: torch.Generator,
    *,
    samples: int = 1,
    field_scale: float = 0.5,
) -> SpinModel:
    """Return Ising spins with couplings ``N(0, strength^2 / N)`` and fields ``N(0, field_scale^2)``, float64.

    For one seed, models of different strengths differ only by that factor of the couplings.

    Args:
        sites: number of spins N.
        strength: strength of the couplings, >= 0.
        generator: on the CPU; the couplings are drawn first.
        samples: number of fields for the same couplings.
        field_scale: standard deviation of the fields, >= 0.
    """
    values = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    drawn = _draw((samples, sites, 1), strength, field_scale, generator)
    return SpinModel(*drawn, values, solvers.IsingSite())


def random_potts(
    sites: int, states: int, strength: float, generator: torch.Generator, *, samples: int = 1,
    field_scale: float = 0.5,
) -> SpinModel:  # fmt: skip
    """Return Potts spins, one-hot in ``states`` dimensions: every pair of states has its own coupling.

    Couplings are ``J_ij^{ab} ~ N(0, strength^2 / N)``; the other arguments are those of :func:`random_ising`.
    """
    values = torch.eye(require_count("states", states, low=2), dtype=torch.float64)
    drawn = _draw((samples, sites, states), strength, field_scale, generator)
    return SpinModel(*drawn, values, solvers.PottsSite())


def exact_moments(model: SpinModel) -> ExactMoments:
    """Means and covariances by the sum over all K^N configurations.

    Log-sum-exp weights and a covariance summed about the mean keep it accurate for strong couplings
    and nearly certain spins.

    Raises:
        ValueError: if there are more than 2^20 configurations.
    """
    batch, sites, dim = model.field.shape
    number = len(model.values) ** sites
    if number > MOST_CONFIGURATIONS:
        raise ValueError(
            f"model must have at most {MOST_CONFIGURATIONS} configurations, got "
            f"{len(model.values)}^{sites} = {number}"
        )
    digits = len(model.values) ** torch.arange(sites)
    choices = torch.arange(number)[:, None] // digits % len(model.values)
    spins = model.values.double()[choices].flatten(1)  # (K^N, N d)
    couplings = model.couplings.double().transpose(1, 2).reshape(sites * dim, sites * dim)
    interaction = 0.5 * ((spins @ couplings) * spins).sum(1)
    rows = []
    for field in model.field.double().flatten(1):
        exponent = interaction + spins @ field
        partition = torch.logsumexp(exponent, 0)
        weight = (exponent - partition).exp()
        mean = weight @ spins
        centred = spins - mean
        covariance = (weight[:, None] * centred).mT @ centred
        rows.append((partition - sites * math.log(len(model.values)), mean, covariance))
    partitions, means, covariances = map(torch.stack, zip(*rows, strict=True))
    shape = (batch, sites, dim)
    return ExactMoments(partitions, means.view(shape), covariances.view(*shape, sites, dim))


def _draw(
    shape: tuple[int, int, int], strength: float, field_scale: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Couplings (N, N, d, d) and fields (B, N, d) of the shape (B, N, d)."""
    samples, sites, dim = shape
    require_count("samples", samples)
    require_count("sites", sites)
    require_nonnegative("strength", strength)
    require_nonnegative("field_scale", field_scale)
    options = {"generator": generator, "dtype": torch.float64}
    normal = torch.randn(sites, sites, dim, dim, **options)
    upper = torch.ones(sites, sites, dtype=torch.float64).triu(1)[..., None, None] * normal
    couplings = strength / math.sqrt(sites) * (upper + upper.permute(1, 0, 3, 2))
    return couplings, field_scale * torch.randn(samples, sites, dim, **options)

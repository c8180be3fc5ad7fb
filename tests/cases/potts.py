"""Small models of discrete sites: exact distributions by enumeration, samples of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicit_attn.energies.spins import zero_sum


def all_colours(sites: int, colours: int) -> Tensor:
    """(d^N, N) int64: every configuration."""
    return torch.cartesian_prod(*[torch.arange(colours)] * sites)


def draw_exactly(log_weight: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """Indices (samples,) of configurations with probabilities ``softmax(log_weight)``."""
    return torch.multinomial(log_weight.softmax(0), samples, replacement=True, generator=generator)


def random_couplings(
    sites: int, colours: int, generator: torch.Generator, scale: float = 1.0
) -> Tensor:
    """J (N, N, d, d) float64 with J_ii = 0 and J_ij^ab = J_ji^ba."""
    upper = torch.triu(torch.ones(sites, sites, dtype=torch.float64), 1)[..., None, None]
    shape = (sites, sites, colours, colours)
    drawn = scale * upper * torch.randn(shape, generator=generator, dtype=torch.float64)
    return drawn + drawn.permute(1, 0, 3, 2)


def samples_of(
    energy: Callable[[Tensor], Tensor], sites: int, colours: int, samples: int, seed: int
) -> Tensor:
    """(samples, N) colours drawn from ``exp(-energy)`` exactly."""
    states = all_colours(sites, colours)
    generator = torch.Generator().manual_seed(seed)
    return states[draw_exactly(-energy(states), samples, generator)]


def coupling_error(couplings: Tensor, truth: Tensor) -> float:
    """``|J^ - J^_true| / |J^_true|`` in the zero-sum gauge."""
    true = zero_sum(truth.detach().double())
    return float((zero_sum(couplings.detach().double()) - true).norm() / true.norm())

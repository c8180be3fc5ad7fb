"""Random models of coupled sites, and what exact enumeration says about them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def couplings(sites: int, dim: int, scale: float, random: torch.Generator) -> Tensor:
    """Entries N(0, scale^2) above the diagonal, symmetric, zero diagonal blocks; float64."""
    drawn = scale * torch.randn(sites, sites, dim, dim, generator=random, dtype=torch.float64)
    upper = drawn * torch.ones(sites, sites, dtype=torch.float64).triu(1)[:, :, None, None]
    return upper + upper.permute(1, 0, 3, 2)


def averaged_couplings(sites: int, dim: int, scale: float, random: torch.Generator) -> Tensor:
    """The symmetric part of a matrix with entries N(0, scale^2), zero diagonal blocks."""
    return couplings(sites, dim, scale / 2**0.5, random)


def fields(batch: int, sites: int, dim: int, random: torch.Generator, scale: float = 0.5) -> Tensor:
    return scale * torch.randn(batch, sites, dim, generator=random, dtype=torch.float64)


def as_matrix(blocks: Tensor) -> Tensor:
    """(N, N, d, d) -> (Nd, Nd)."""
    size = blocks.shape[0] * blocks.shape[2]
    return blocks.permute(0, 2, 1, 3).reshape(size, size)


def symmetric(raw: Tensor) -> Tensor:
    """Couplings from free entries, differentiably."""
    outside = 1 - torch.eye(len(raw), dtype=raw.dtype)
    return (raw + raw.permute(1, 0, 3, 2)) / 2 * outside[:, :, None, None]


def ising_states(sites: int) -> Tensor:
    """(2^N, N)."""
    return torch.tensor(list(itertools.product([-1.0, 1.0], repeat=sites)), dtype=torch.float64)


def potts_states(sites: int, dim: int) -> Tensor:
    """(d^N, N d) one-hot."""
    states = torch.tensor(list(itertools.product(range(dim), repeat=sites)))
    return torch.nn.functional.one_hot(states, dim).double().flatten(1)


def enumerate_moments(states: Tensor, blocks: Tensor, field: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (Nd,) and covariance (Nd, Nd) over all states for a field (N, d)."""
    energy = 0.5 * ((states @ as_matrix(blocks)) * states).sum(1) + states @ field.flatten()
    weight = torch.softmax(energy, 0)
    mean = weight @ states
    around = states - mean
    return mean, around.T @ (weight.unsqueeze(1) * around)

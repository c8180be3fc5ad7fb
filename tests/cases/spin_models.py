"""Random models of coupled sites, what exact enumeration says about them, samples of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def couplings(sites: int, dim: int, scale: float, random: torch.Generator) -> Tensor:
    """Entries N(0, scale^2) above the diagonal, symmetric, zero diagonal blocks; float64."""
    drawn = scale * torch.randn(sites, sites, dim, dim, generator=random, dtype=torch.float64)
    upper = drawn * torch.ones(sites, sites, dtype=torch.float64).triu(1)[:, :, None, None]
    return upper + upper.permute(1, 0, 3, 2)


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


def all_colours(sites: int, colours: int) -> Tensor:
    """(d^N, N) int64: every configuration."""
    return torch.cartesian_prod(*[torch.arange(colours)] * sites).view(-1, sites)


def potts_states(sites: int, dim: int) -> Tensor:
    """(d^N, N d) one-hot."""
    return torch.nn.functional.one_hot(all_colours(sites, dim), dim).double().flatten(1)


def enumerate_moments(states: Tensor, blocks: Tensor, field: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (Nd,) and covariance (Nd, Nd) over all states for a field (N, d)."""
    energy = 0.5 * ((states @ as_matrix(blocks)) * states).sum(1) + states @ field.flatten()
    weight = torch.softmax(energy, 0)
    mean = weight @ states
    around = states - mean
    return mean, around.T @ (weight.unsqueeze(1) * around)


TREE = ((0, 1), (2, 1), (1, 3), (3, 4))
TWO_TREES = ((0, 1), (2, 1), (3, 4))
RING = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 0))


class Exact(NamedTuple):
    """By enumeration: log Z (B,), marginals (B, N, d), pair marginals (B, N, N, d, d)."""

    log_partition: Tensor
    mean: Tensor
    pairs: Tensor


def pair_list(
    edges: tuple[tuple[int, int], ...], dim: int, scale: float, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Pairs (E, 2) and couplings (E, d, d), float64."""
    blocks = torch.randn(len(edges), dim, dim, generator=random, dtype=torch.float64)
    return torch.tensor(edges), scale * blocks


def dense(edges: Tensor, blocks: Tensor, sites: int) -> Tensor:
    """(N, N, d, d) of listed pairs."""
    whole = blocks.new_zeros(sites, sites, *blocks.shape[1:])
    first, second = edges.unbind(1)
    return whole.index_put((first, second), blocks).index_put((second, first), blocks.mT)


def enumerated(couplings: Tensor, field: Tensor, allowed: Tensor | None = None) -> Exact:
    """Of couplings (N, N, d, d) and fields (B, N, d), over the states where ``allowed`` (d^N, N d)."""
    sites, dim = field.shape[1:]
    states = potts_states(sites, dim)  # (S, N d)
    labels = states.view(-1, sites, dim).argmax(2)
    weight = field.new_zeros(len(field), len(labels))
    for i in range(sites):
        weight = weight + field[:, i, labels[:, i]]
        for j in range(i):
            weight = weight + couplings[i, j, labels[:, i], labels[:, j]]
    if allowed is not None:
        weight = torch.where(allowed, weight, -torch.inf)
    chance = torch.softmax(weight, 1)
    both = torch.einsum("bs,sx,sy->bxy", chance, states, states)
    pairs = both.view(-1, sites, dim, sites, dim).transpose(2, 3)
    return Exact(weight.logsumexp(1), (chance @ states).view(field.shape), pairs)


def samples_of(
    energy: Callable[[Tensor], Tensor], sites: int, colours: int, samples: int, seed: int
) -> Tensor:
    """(samples, N) colours drawn from ``exp(-energy)`` exactly."""
    states = all_colours(sites, colours)
    weight, random = (-energy(states)).softmax(0), generator(seed)
    return states[torch.multinomial(weight, samples, replacement=True, generator=random)]

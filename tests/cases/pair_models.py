"""Random pair models on given graphs, and what enumeration says about them, hard constraints included."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cases.spin_models import potts_states

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

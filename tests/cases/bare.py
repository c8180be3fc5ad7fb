"""Bare attention with random couplings, and tokens for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.energies import BareAttention

F64 = torch.float64
# Tokens that are not masked: all, three, one.
KEEP = torch.tensor([[True] * 4, [True, False, True, True], [False, False, True, False]])


def made(sites: int = 4, dim: int = 4, *, size: float = 1.0, **options: Any) -> BareAttention:
    """With couplings N(0, size^2), drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sites + dim)
        energy = BareAttention(sites, dim, **options).double()
        nn.init.normal_(energy.couplings.free, std=size)
    return energy


def on_circles(batch: int, sites: int, dim: int, seed: int = 0) -> Tensor:
    """Tokens (B, N, d) of d / 2 points on unit circles."""
    angles = torch.rand(batch, sites, dim // 2, generator=seeded(seed), dtype=F64) * 2 * math.pi
    return torch.stack([angles.cos(), angles.sin()], -1).flatten(-2)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def features(dim: int, width: int) -> Tensor:
    return torch.randn(dim, width, generator=seeded(9), dtype=F64) / width**0.5

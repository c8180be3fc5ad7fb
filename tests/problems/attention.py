"""Attention as a fixed point: Hopfield retrieval, mean-field spins, bi-softmax energies."""

from __future__ import annotations

from functools import partial

import torch
from torch import Generator, Tensor
from torch.nn.functional import gelu, normalize

from problems.problem import Build, ZooProblem, normal
from problems.reference import contraction, minimum


def hopfield_map(z: Tensor, patterns: Tensor, beta: Tensor) -> Tensor:
    """``X^T softmax(beta X z)``: patterns X (B, M, D), beta (B, 1)."""
    weights = (beta * torch.einsum("bmd,bd->bm", patterns, z)).softmax(1)
    return torch.einsum("bmd,bm->bd", patterns, weights)


def hopfield_energy(z: Tensor, patterns: Tensor, beta: Tensor) -> Tensor:
    """``|z|^2 / 2 - lse(beta X z) / beta``."""
    overlap = beta * torch.einsum("bmd,bd->bm", patterns, z)
    return 0.5 * (z * z).sum(1) - overlap.logsumexp(1) / beta.squeeze(1)


def hopfield(generator: Generator, *, beta: float, noise: float) -> ZooProblem:
    """Retrieval of one unit pattern a sample from a noisy cue; a small beta blends patterns."""
    batch, memories, dim = 6, 32, 64
    patterns = normalize(normal(generator, batch, memories, dim), dim=-1)
    rows = torch.arange(batch)
    cue = patterns[rows, rows] + noise * normal(generator, batch, dim) / dim**0.5
    args = (patterns, torch.full((batch, 1), beta, dtype=torch.float64))
    return ZooProblem(
        f=hopfield_map, z0=cue, args=args, symmetric=True,
        source="H. Ramsauer et al., Hopfield Networks is All You Need (2020), equations 2 and 3",
        reference=lambda: contraction(hopfield_map, cue, args, 200), energy=hopfield_energy,
        unique=False,
    )  # fmt: skip


def mean_field_map(z: Tensor, couplings: Tensor, inner: Tensor, outer: Tensor, x: Tensor) -> Tensor:
    """``J z - ffn(z) + x``: z, x (B, N, d); J (B, N, N, d, d); inner (B, d, h), outer (B, h, d)."""
    correction = gelu(z @ inner) @ outer
    return torch.einsum("bijkl,bjl->bik", couplings, z) - correction + x


def mean_field(generator: Generator, *, gain: float) -> ZooProblem:
    """17 spins of dimension 10, couplings N(0, gain^2 / (N d^2)), symmetric, no self-coupling."""
    batch, spins, dim, hidden = 6, 17, 10, 40
    couplings = normal(generator, batch, spins, spins, dim, dim) / (spins**0.5 * dim)
    couplings = (couplings + couplings.permute(0, 2, 1, 4, 3)) / 2**0.5
    diagonal = torch.arange(spins)
    couplings[:, diagonal, diagonal] = 0
    inner = normal(generator, batch, dim, hidden) / dim**0.5
    outer = gain * normal(generator, batch, hidden, dim) / (2 * hidden**0.5)
    x = normal(generator, batch, spins, dim)
    args = (gain * couplings, inner, outer, x)
    z0 = torch.zeros_like(x)

    return ZooProblem(
        f=mean_field_map, z0=z0, args=args, symmetric=False,
        source="M. Bal, Deep Implicit Attention (2021), z = J z - f(z) + x",
        reference=lambda: contraction(mean_field_map, z0, args, 200), unique=False,
    )  # fmt: skip


def soft_norm(y: Tensor) -> tuple[Tensor, Tensor]:
    """``y / sqrt(mean(y^2) + 1)`` along the last dimension, and the factor."""
    factor = (y.square().mean(-1, keepdim=True) + 1).rsqrt()
    return y * factor, factor


def soft_norm_pullback(gradient: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    """Gradient with respect to y of a function with ``gradient`` with respect to its soft norm."""
    along = (gradient * y).mean(-1, keepdim=True)
    return factor * gradient - factor**3 * along * y


def bisoftmax_map(z: Tensor, heads: Tensor, memories: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """``z - dE/dz`` of :func:`bisoftmax_energy`, in closed form.

    z, x (B, N, d); heads (B, h, d, p); memories (B, d, M); weights (B, 2).
    """
    beta = heads.shape[-1] ** -0.5
    attention, feedforward = weights.reshape(-1, 2, 1, 1, 1).unbind(1)
    query = torch.einsum("bnd,bhdp->bhnp", z, heads)
    unit, factor = soft_norm(query)
    probability = (beta * unit @ unit.mT).softmax(-1)
    pulled = soft_norm_pullback((probability + probability.mT) @ unit, query, factor)
    descent = torch.einsum("bhnp,bhdp->bnd", attention * pulled, heads)
    key = z @ memories
    unit, factor = soft_norm(key)
    pulled = soft_norm_pullback(-unit.relu(), key, factor)
    return x - descent - feedforward.squeeze(1) * (pulled @ memories.mT)


def bisoftmax_energy(
    z: Tensor, heads: Tensor, memories: Tensor, x: Tensor, weights: Tensor
) -> Tensor:
    """``a sum_hi lse_j(beta q_i.q_j) / beta - b/2 sum relu(k)^2 + |z - x|^2 / 2``, (B,).

    ``q`` and ``k`` are the soft norms of ``W_h^T z`` and ``D^T z``, ``beta = 1 / sqrt(p)``.
    """
    beta = heads.shape[-1] ** -0.5
    query, _ = soft_norm(torch.einsum("bnd,bhdp->bhnp", z, heads))
    attention = (beta * query @ query.mT).logsumexp(-1).sum((1, 2)) / beta
    key, _ = soft_norm(z @ memories)
    feedforward = -0.5 * key.relu().square().sum((1, 2))
    distance = 0.5 * (z - x).square().sum((1, 2))
    return weights[:, 0] * attention + weights[:, 1] * feedforward + distance


def bisoftmax(
    generator: Generator, *, attention: float, feedforward: float, plain: bool
) -> ZooProblem:
    """16 tokens of dimension 64, 4 heads, 128 memories, standard initialisation, from z = x."""
    batch, tokens, dim, count, memories = 4, 16, 64, 4, 128
    heads = normal(generator, batch, count, dim, dim // count) / dim**0.5
    memory = normal(generator, batch, dim, memories) / dim**0.5
    x = normal(generator, batch, tokens, dim)
    weights = torch.tensor([attention, feedforward], dtype=torch.float64).repeat(batch, 1)
    args = (heads, memory, x, weights)
    return ZooProblem(
        f=bisoftmax_map, z0=x.clone(), args=args, symmetric=True, converges_plain=plain,
        source="Y. Hu, D. Zou, D. Xu, Hyper-SET (arXiv 2502.11646), equations 3 and 7",
        reference=lambda: minimum(bisoftmax_map, bisoftmax_energy, x, args),
        energy=bisoftmax_energy, unique=False,
    )  # fmt: skip


BUILDS: dict[str, Build] = {
    "hopfield_retrieval": partial(hopfield, beta=20.0, noise=0.5),
    "hopfield_metastable": partial(hopfield, beta=7.0, noise=0.5),
    "mean_field": partial(mean_field, gain=1.0),
    "mean_field_strong": partial(mean_field, gain=1.2),
    "energy_bisoftmax_0.2_0.2": partial(bisoftmax, attention=0.2, feedforward=0.2, plain=True),
    "energy_bisoftmax_0.4_0.2": partial(bisoftmax, attention=0.4, feedforward=0.2, plain=False),
    "energy_bisoftmax_1.0_0.3": partial(bisoftmax, attention=1.0, feedforward=0.3, plain=False),
}

"""Energies: convex ones of every condition number, curved valleys, wells, log-sum-exp, attention."""

from __future__ import annotations

from functools import partial

import torch
from torch import Generator, Tensor
from torch.nn.functional import gelu, normalize

from problems.linear import affine_problem, symmetric_matrix
from problems.problem import Build, Expect, ZooProblem, contraction, matvec, minimum, normal
from problems.systems import MGH, helical_valley, powell_singular


def quadratic(generator: Generator, *, condition: float, plain: bool = True) -> ZooProblem:
    """Convex quadratic, Hessian eigenvalues log-spaced in [1 / condition, 1], minimum N(0, 1)."""
    batch, dim = 6, 40
    curvature = torch.logspace(0, -1, dim, base=condition, dtype=torch.float64).repeat(batch, 1)
    matrix = symmetric_matrix(generator, 1 - curvature)
    minimiser = normal(generator, batch, dim)
    offset = minimiser - matvec(matrix, minimiser)
    source = "J. Nocedal, S. Wright, Numerical Optimization (2nd ed., 2006), section 3.3"
    z0 = normal(generator, batch, dim)
    return affine_problem(matrix, offset, z0, source, converges_plain=plain)


def valley_map(z: Tensor, steepness: Tensor) -> Tensor:
    """``z - s dV/dz`` of the valley ``V = (1 - z1)^2 + steepness (z2 - z1^2)^2``."""
    first, second = z.unbind(1)
    gap = second - first**2
    gradient = torch.stack(
        [2 * (first - 1) - 4 * steepness[:, 0] * first * gap, 2 * steepness[:, 0] * gap], 1
    )
    return z - gradient / (20 * steepness)


def valley_energy(z: Tensor, steepness: Tensor) -> Tensor:
    """``V / (20 steepness)``."""
    first, second = z.unbind(1)
    value = (1 - first) ** 2 + steepness[:, 0] * (second - first**2) ** 2
    return value / (20 * steepness[:, 0])


def valley(generator: Generator, *, steepness: float, plain: bool = True) -> ZooProblem:
    """Rosenbrock's valley (steepness 100 in the original), step below 2 / curvature at (1, 1)."""
    batch = 4
    z0 = torch.tensor([-1.2, 1.0], dtype=torch.float64).repeat(batch, 1)
    z0[1:] += 0.1 * normal(generator, batch - 1, 2)
    return ZooProblem(
        f=valley_map, z0=z0, args=(torch.full((batch, 1), steepness, dtype=torch.float64),),
        symmetric=True, converges_plain=plain,
        source="H. Rosenbrock, Computer Journal 3 (1960) 175; " + MGH.format(1),
        reference=lambda: torch.ones(batch, 2, dtype=torch.float64), energy=valley_energy,
    )  # fmt: skip


def log_sum_exp_map(z: Tensor, design: Tensor, offset: Tensor, centre: Tensor) -> Tensor:
    """``z - s dE/dz`` of :func:`log_sum_exp_energy`, with the same s."""
    weights = (matvec(design, z) + offset).softmax(1)
    return z - _step(design) * (matvec(design.mT, weights) + 0.1 * (z - centre))


def log_sum_exp_energy(z: Tensor, design: Tensor, offset: Tensor, centre: Tensor) -> Tensor:
    """``s (lse(A z + c) + |z - centre|^2 / 20)``, (B,); s from a bound on the curvature."""
    value = (matvec(design, z) + offset).logsumexp(1) + 0.05 * (z - centre).square().sum(1)
    return _step(design).squeeze(1) * value


def _step(design: Tensor) -> Tensor:
    """``1 / (max row |a|^2 + 0.1)``, (B, 1): lse has no curvature above the largest row norm."""
    return 1 / (design.square().sum(2).amax(1, keepdim=True) + 0.1)


def log_sum_exp(generator: Generator) -> ZooProblem:
    """Smooth maximum of 50 random affine functions and a weak quadratic; ill conditioned."""
    batch, terms, dim = 6, 50, 20
    design = normal(generator, batch, terms, dim)
    args = (design, normal(generator, batch, terms), normal(generator, batch, dim))
    z0 = normal(generator, batch, dim)
    return ZooProblem(
        f=log_sum_exp_map, z0=z0, args=args, symmetric=True,
        source="S. Boyd, L. Vandenberghe, Convex Optimization (2004), sections 3.1.5 and 9.2",
        reference=lambda: minimum(log_sum_exp_map, log_sum_exp_energy, z0, args),
        energy=log_sum_exp_energy,
    )  # fmt: skip


def wells_map(z: Tensor, coupling: Tensor) -> Tensor:
    """``z - 0.2 (z^3 - z + K z)``."""
    return z - 0.2 * (z**3 - z + matvec(coupling, z))


def wells_energy(z: Tensor, coupling: Tensor) -> Tensor:
    """``0.2 (sum (z^2 - 1)^2 / 4 + z^T K z / 2)``."""
    return 0.2 * ((z * z - 1).square() / 4 + 0.5 * z * matvec(coupling, z)).sum(1)


def wells(generator: Generator) -> ZooProblem:
    """Coupled double wells, started near the saddle at 0: many minima, more saddles."""
    batch, dim = 6, 20
    raw = normal(generator, batch, dim, dim) / dim**0.5
    coupling = 0.3 * (raw + raw.mT) / 2**0.5
    z0 = 0.05 * normal(generator, batch, dim)
    args = (coupling,)
    return ZooProblem(
        f=wells_map, z0=z0, args=args, symmetric=True,
        source="D. Wales, Energy Landscapes (2003): coupled quartic double wells",
        reference=lambda: minimum(wells_map, wells_energy, z0, args), energy=wells_energy,
        unique=False,
    )  # fmt: skip


SYSTEMS = {"powell": powell_singular, "helical": helical_valley}


def squares_energy(z: Tensor, origin: Tensor, system: str, step: float) -> Tensor:
    """``step |F(z - o)|^2 / 2``, (B,)."""
    return 0.5 * step * SYSTEMS[system](z - origin).square().sum(1)


def squares_map(z: Tensor, origin: Tensor, system: str, step: float) -> Tensor:
    """``z - step F'(z - o)^T F(z - o)``, F' by automatic differentiation; differentiable again."""
    value, *rest = torch.func.vjp(SYSTEMS[system], z - origin)
    (gradient,) = rest[0](value)
    return z - step * gradient


def least_squares(
    generator: Generator, *, system: str, start: tuple[float, ...], answer: tuple[float, ...],
    step: float, source: str, origin: float = 0.0, expect: Expect = "converges", plain: bool = True,
) -> ZooProblem:  # fmt: skip
    """The sum of squares of a system: symmetric where the system itself is not."""
    batch = 4
    z0 = torch.tensor(start, dtype=torch.float64).repeat(batch, 1)
    z0[1:] += 0.1 * normal(generator, batch - 1, len(start))
    moved = torch.full_like(z0, origin)
    return ZooProblem(
        f=partial(squares_map, system=system, step=step), z0=z0 + moved, args=(moved,),
        symmetric=True, converges_plain=plain, expect=expect, source=source,
        reference=lambda: moved + torch.tensor(answer, dtype=torch.float64),
        energy=partial(squares_energy, system=system, step=step),
    )  # fmt: skip


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
    "energy_quadratic_10": partial(quadratic, condition=1e1),
    "energy_quadratic_100": partial(quadratic, condition=1e2),
    "energy_quadratic_1e4": partial(quadratic, condition=1e4, plain=False),
    "energy_rosenbrock_10": partial(valley, steepness=10.0),
    "energy_rosenbrock_100": partial(valley, steepness=100.0, plain=False),
    "energy_log_sum_exp": log_sum_exp,
    "energy_double_wells": wells,
    "energy_powell_singular": partial(least_squares, system="powell", start=(3.0, -1.0, 0.0, 1.0),
        answer=(0.0, 0.0, 0.0, 0.0), origin=1.0, step=2e-3, plain=False, source=MGH.format(13)),
    "energy_helical_valley": partial(least_squares, system="helical", start=(-1.0, 0.0, 0.0),
        answer=(1.0, 0.0, 0.0), step=2e-3, plain=False, source=MGH.format(7)),
    "hopfield_retrieval": partial(hopfield, beta=20.0, noise=0.5),
    "hopfield_metastable": partial(hopfield, beta=7.0, noise=0.5),
    "mean_field": partial(mean_field, gain=1.0),
    "mean_field_strong": partial(mean_field, gain=1.2),
    "energy_bisoftmax_0.2_0.2": partial(bisoftmax, attention=0.2, feedforward=0.2, plain=True),
    "energy_bisoftmax_0.4_0.2": partial(bisoftmax, attention=0.4, feedforward=0.2, plain=False),
    "energy_bisoftmax_1.0_0.3": partial(bisoftmax, attention=1.0, feedforward=0.3, plain=False),
}  # fmt: skip

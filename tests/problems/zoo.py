"""The problem zoo: fixed-point problems with known answers, by name.

>>> problem = make("kepler")
>>> residual = problem.f(problem.z0, *problem.args) - problem.z0

The numbers are drawn in float64 on the CPU, so one seed gives the same problem everywhere. Adding a
problem is one builder and one entry in the table of its family: linear maps, other maps, energies,
pathological ones, and the systems of ``collected.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Generator, Tensor
from torch.nn.functional import gelu, normalize

from problems import (
    Build,
    Expect,
    ZooProblem,
    cast,
    contraction,
    matvec,
    normal,
    orthogonal,
    uniform,
)
from problems.collected import BUILDS as SYSTEM_BUILDS
from problems.collected import MGH, helical_valley, powell_singular

BATCH, DIM = 6, 40
RADII = (0.5, 0.9, 0.98)
SCALES = (1e-3, 1.0, 1e3)
SAAD = "Y. Saad, Iterative Methods for Sparse Linear Systems (2nd ed., 2003), section 4.2"
WALKER_NI = "H. Walker and P. Ni, SIAM J. Numer. Anal. 49 (2011) 1715, theorem 2.2"


def descent(energy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``z - dE/dz``, row by row; differentiable again."""

    def f(z: Tensor, *args: Tensor) -> Tensor:
        return z - torch.func.grad(lambda z: energy(z, *args).sum())(z)

    return f


def minimised(
    energy: Callable[..., Tensor], z0: Tensor, args: tuple[Tensor, ...], source: str, **other: Any
) -> ZooProblem:
    """``z = z - dE/dz``; ``other`` are fields of the problem."""
    f = descent(energy)
    return ZooProblem(f=f, z0=z0, args=args, symmetric=True, source=source, energy=energy, **other)


def affine(z: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """``A z + b``: z (B, D), matrix (B, D, D), offset (B, D)."""
    return matvec(matrix, z) + offset


def affine_energy(z: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """``1/2 z^T (I - A) z - b.z`` for symmetric A, (B,)."""
    return (0.5 * z * (z - matvec(matrix, z)) - offset * z).sum(1)


def symmetric_matrix(generator: Generator, eigenvalues: Tensor) -> Tensor:
    """``Q diag(eigenvalues) Q^T`` with random orthogonal Q; eigenvalues (B, D)."""
    return with_spectrum(orthogonal(generator, *eigenvalues.shape), eigenvalues)


def with_spectrum(basis: Tensor, eigenvalues: Tensor) -> Tensor:
    """``Q diag(eigenvalues) Q^T``: basis Q (B, D, D), eigenvalues (B, D)."""
    return torch.einsum("bij,bj,bkj->bik", basis, eigenvalues, basis)


def affine_problem(
    matrix: Tensor, offset: Tensor, z0: Tensor, source: str, *, symmetric: bool = True, **other: Any
) -> ZooProblem:
    """``z = A z + b``: the reference by an LU factorisation, an energy where A is symmetric.

    ``other`` are fields of the problem, which may replace these two.
    """
    unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    fields: dict[str, Any] = {"reference": lambda: torch.linalg.solve(unit - matrix, offset)}
    fields["energy"] = affine_energy if symmetric else None
    fields |= {"symmetric": symmetric, "source": source, **other}
    return ZooProblem(f=affine, z0=z0, args=(matrix, offset), **fields)


def _spectrum(generator: Generator, radius: float) -> Tensor:
    """Real eigenvalues in [-radius / 2, radius], the largest equal to radius; (B, D)."""
    eigenvalues = uniform(generator, -0.5 * radius, radius, BATCH, DIM)
    eigenvalues[:, 0] = radius
    return eigenvalues


def _rotations(generator: Generator, radius: float) -> Tensor:
    """Block-diagonal scaled rotations, eigenvalues ``rho exp(+-i theta)``, largest rho = radius."""
    half = DIM // 2
    moduli = uniform(generator, 0.0, radius, BATCH, half)
    moduli[:, 0] = radius
    angles = uniform(generator, 0.0, torch.pi, BATCH, half)
    blocks = torch.zeros(BATCH, DIM, DIM, dtype=torch.float64)
    even = torch.arange(0, DIM, 2)
    blocks[:, even, even] = blocks[:, even + 1, even + 1] = moduli * angles.cos()
    blocks[:, even + 1, even] = moduli * angles.sin()
    blocks[:, even, even + 1] = -moduli * angles.sin()
    return blocks


def _matrix(generator: Generator, kind: str, radius: float) -> Tensor:
    if kind == "symmetric":
        return symmetric_matrix(generator, _spectrum(generator, radius))
    if kind == "normal":
        core = _rotations(generator, radius)
    else:
        # a strictly upper triangular part moves no eigenvalue of a triangular core
        noise = normal(generator, BATCH, DIM, DIM).triu(1) / DIM**0.5
        core = torch.diag_embed(_spectrum(generator, radius)) + noise
    basis = orthogonal(generator, BATCH, DIM)
    return basis @ core @ basis.mT


def linear_contraction(
    generator: Generator, *, kind: str, radius: float, scale: float
) -> ZooProblem:
    """Spectral radius ``radius``; the state, its start and the offset in units of ``scale``."""
    matrix = _matrix(generator, kind, radius)
    offset, z0 = (scale * normal(generator, BATCH, DIM) for _ in range(2))
    return affine_problem(matrix, offset, z0, SAAD, symmetric=kind == "symmetric")


def expanding(generator: Generator, *, low: float, outlier: float | None = None) -> ZooProblem:
    """Symmetric, eigenvalues in [low, 0.5] with low < -1, and one equal to ``outlier`` if given.

    Plain iteration diverges. Without an outlier ``I - A`` is positive definite and a short enough
    step converges; with an outlier above 1 it is indefinite and no step does.
    """
    dim = 20
    eigenvalues = uniform(generator, low, 0.5, BATCH, dim)
    eigenvalues[:, 0] = low
    if outlier is not None:
        eigenvalues[:, 1] = outlier
    matrix = symmetric_matrix(generator, eigenvalues)
    offset, z0 = normal(generator, BATCH, dim), normal(generator, BATCH, dim)
    # at a saddle the energy has no lower bound and is no merit function
    energy = affine_energy if outlier is None else None
    return affine_problem(matrix, offset, z0, WALKER_NI, energy=energy)


def one_hard(generator: Generator) -> ZooProblem:
    """Eigenvalues up to 0.2 in every sample but the last, up to 0.98 there."""
    eigenvalues = _spectrum(generator, 0.2)
    eigenvalues[-1] *= 0.98 / 0.2
    matrix = symmetric_matrix(generator, eigenvalues)
    offset, z0 = normal(generator, BATCH, DIM), normal(generator, BATCH, DIM)
    return affine_problem(matrix, offset, z0, SAAD)


def singular(generator: Generator) -> ZooProblem:
    """Eigenvalue exactly 1 with a consistent offset: a line of fixed points, met where z0 says."""
    basis = orthogonal(generator, BATCH, 20)
    eigenvalues = uniform(generator, -0.5, 0.8, BATCH, 20)
    eigenvalues[:, 0] = 1.0
    matrix = with_spectrum(basis, eigenvalues)
    z0, offset = normal(generator, BATCH, 20), normal(generator, BATCH, 20)
    null = basis[:, :, 0]
    offset = offset - (offset * null).sum(1, keepdim=True) * null
    source = "C. D. Meyer, Matrix Analysis and Applied Linear Algebra (2000), section 7.10"
    return affine_problem(matrix, offset, z0, source, reference=None)


LINEAR_BUILDS: dict[str, Build] = {
    **{
        f"linear_{kind}_{radius}" + (f"_scale_{scale:g}" if scale != 1 else ""): partial(
            linear_contraction, kind=kind, radius=radius, scale=scale
        )
        for kind in ("symmetric", "normal", "nonnormal")
        for radius in RADII
        for scale in SCALES
    },
    "linear_expanding": partial(expanding, low=-3.0),
    "linear_saddle": partial(expanding, low=-1.5, outlier=1.5),
    "linear_one_hard_sample": one_hard,
    "linear_singular": singular,
}


def cosine(generator: Generator) -> ZooProblem:
    """``z = cos z``: the Dottie number from eight starts."""
    z0 = uniform(generator, -3.0, 10.0, 8, 1)

    def reference() -> Tensor:
        number = float(brentq(lambda z: np.cos(z) - z, 0.0, 1.0, xtol=1e-15))  # pyright: ignore
        return torch.full_like(z0, number)

    return ZooProblem(
        f=torch.cos, z0=z0, args=(), symmetric=True,
        source="S. R. Kaplan, The Dottie number, Mathematics Magazine 80 (2007) 73",
        reference=reference, energy=lambda z: (0.5 * z * z - z.sin()).sum(1),
    )  # fmt: skip


def kepler(generator: Generator) -> ZooProblem:
    """Kepler's equation ``M = E - e sin E`` for eccentricities up to 0.9, from E = M."""
    eccentricity = torch.linspace(0.1, 0.9, 8, dtype=torch.float64).unsqueeze(1)
    anomaly = uniform(generator, 0.1, 3.0, 8, 1)

    def reference() -> Tensor:
        found = [
            brentq(lambda z, m=m, e=e: z - e * np.sin(z) - m, m - 1, m + 1, xtol=1e-15)
            for m, e in torch.cat([anomaly, eccentricity], 1).tolist()
        ]
        return torch.tensor(found, dtype=torch.float64).unsqueeze(1)

    return ZooProblem(
        f=lambda z, m, e: m + e * z.sin(), z0=anomaly.clone(),
        args=(anomaly, eccentricity), symmetric=True,
        source="P. Colwell, Solving Kepler's Equation over Three Centuries (1993)",
        reference=reference, energy=lambda z, m, e: (0.5 * z * z - m * z + e * z.cos()).sum(1),
    )  # fmt: skip


def two_fixed_points(generator: Generator) -> ZooProblem:
    """``z = z^2 + c``: an attracting and a repelling fixed point, started between the two.

    ``z = (1 -+ sqrt(1 - 4 c)) / 2``; the reference is the attracting one.
    """
    constant = uniform(generator, 0.02, 0.2, 8, 1)
    gap = (1 - 4 * constant).sqrt()
    low, high = (1 - gap) / 2, (1 + gap) / 2
    return ZooProblem(
        f=lambda z, c: z * z + c, z0=low + uniform(generator, 0.3, 0.95, 8, 1) * (high - low),
        args=(constant,), symmetric=True,
        source="R. Devaney, An Introduction to Chaotic Dynamical Systems (1989): quadratic map",
    )  # fmt: skip


def heron(generator: Generator) -> ZooProblem:
    """Heron's square root: two attracting fixed points, the sign of the start decides."""
    radicand = uniform(generator, 0.5, 20.0, 8, 1)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(4).unsqueeze(1)
    return ZooProblem(
        f=lambda z, a: 0.5 * (z + a / z), z0=sign * uniform(generator, 0.2, 10.0, 8, 1),
        args=(radicand,), symmetric=True,
        source="Heron of Alexandria, Metrica I.8; P. Henrici, Elements of Numerical Analysis",
    )  # fmt: skip


def logistic_cycle(generator: Generator) -> ZooProblem:
    """Rates 3.1 to 3.9: plain iteration cycles or turns chaotic, the answer ``1 - 1/r`` repels."""
    rate = torch.linspace(3.1, 3.9, 6, dtype=torch.float64).unsqueeze(1)
    return ZooProblem(
        f=lambda z, r: r * z * (1 - z), z0=uniform(generator, 0.4, 0.9, 6, 1), args=(rate,),
        symmetric=True, source="R. May, Nature 261 (1976) 459",
        reference=lambda: 1 - 1 / rate,
    )  # fmt: skip


def h_equation_map(z: Tensor, albedo: Tensor) -> Tensor:
    """``H(mu) = 1 / (1 - (w / 2) int_0^1 mu H(nu) / (mu + nu) dnu)`` by the midpoint rule."""
    n = z.shape[1]
    mu = (torch.arange(n, dtype=z.dtype, device=z.device) + 0.5) / n
    kernel = mu.unsqueeze(1) / (mu.unsqueeze(1) + mu) / n
    return 1 / (1 - 0.5 * albedo * torch.einsum("ij,bj->bi", kernel, z))


def h_equation(generator: Generator) -> ZooProblem:
    """Chandrasekhar's H-equation; at an albedo near 1 the Jacobian's radius nears 1."""
    albedo = torch.tensor([0.5, 0.9, 0.99, 0.9999], dtype=torch.float64).unsqueeze(1)
    z0 = torch.ones(4, 50, dtype=torch.float64)
    return ZooProblem(
        f=h_equation_map,
        z0=z0,
        args=(albedo,),
        symmetric=False,
        source="S. Chandrasekhar, Radiative Transfer (1960), chapter 5; A. Toth, C. T. Kelley, "
        "SIAM J. Numer. Anal. 53 (2015) 805, numerical results",
    )


def bellman_map(z: Tensor, transition: Tensor, reward: Tensor) -> Tensor:
    """``max_a [ r_a + 0.95 P_a z ]``: transition (B, A, S, S), reward (B, A, S)."""
    return (reward + 0.95 * torch.einsum("bast,bt->bas", transition, z)).amax(1)


def bellman(generator: Generator) -> ZooProblem:
    """Value iteration in a random decision process; Newton's method on it iterates policies."""
    batch, actions, states = 4, 4, 30
    transition = normal(generator, batch, actions, states, states).mul(3).softmax(-1)
    reward = uniform(generator, 0.0, 1.0, batch, actions, states)
    args = (transition, reward)
    z0 = torch.zeros(batch, states, dtype=torch.float64)
    return ZooProblem(
        f=bellman_map, z0=z0, args=args, symmetric=False,
        source="M. Puterman, Markov Decision Processes (1994), sections 6.3 and 6.4",
        reference=lambda: contraction(bellman_map, z0, args, 100),
    )  # fmt: skip


def shrinkage_map(z: Tensor, design: Tensor, target: Tensor, step: Tensor) -> Tensor:
    """``S(z - s A^T (A z - y))`` with the soft threshold S at 0.1 s: design (B, M, D)."""
    ahead = z - step * matvec(design.mT, matvec(design, z) - target)
    return torch.sign(ahead) * (ahead.abs() - 0.1 * step).clamp_min(0)


def shrinkage(generator: Generator) -> ZooProblem:
    """Iterative soft thresholding for a sparse regression with fewer equations than unknowns."""
    batch, equations, unknowns = 4, 30, 50
    design = normal(generator, batch, equations, unknowns) / equations**0.5
    truth = normal(generator, batch, unknowns)
    truth[:, 5:] = 0
    target = matvec(design, truth) + 0.01 * normal(generator, batch, equations)
    step = torch.linalg.matrix_norm(design, 2).pow(-2).unsqueeze(1)
    z0 = torch.zeros(batch, unknowns, dtype=torch.float64)
    args = (design, target, step)
    return ZooProblem(
        f=shrinkage_map, z0=z0, args=args, symmetric=False,
        source="A. Beck, M. Teboulle, SIAM J. Imaging Sci. 2 (2009) 183: ISTA",
        reference=lambda: contraction(shrinkage_map, z0, args, 3000),
    )  # fmt: skip


LAYERS, WIDTH = 6, 64


def dense_layer(z: Tensor, weight: Tensor, injection: Tensor, activation: str) -> Tensor:
    """``phi(W z + x)``: weight (B, D, D), injection (B, D)."""
    return getattr(torch, activation)(matvec(weight, z) + injection)


def layer(generator: Generator, *, activation: str, norm: float) -> ZooProblem:
    """A dense equilibrium layer with a Gaussian weight of spectral norm ``norm`` below 1."""
    weight = normal(generator, LAYERS, WIDTH, WIDTH)
    weight = norm * weight / torch.linalg.matrix_norm(weight, 2).reshape(-1, 1, 1)
    return _layer(weight, normal(generator, LAYERS, WIDTH), activation)


def symmetric_layer(generator: Generator, *, activation: str, radius: float) -> ZooProblem:
    """Symmetric weight with eigenvalues up to ``radius``, a bias that keeps most units active."""
    eigenvalues = uniform(generator, -0.5 * radius, radius, LAYERS, WIDTH)
    eigenvalues[:, 0] = radius
    weight = symmetric_matrix(generator, eigenvalues)
    return _layer(weight, normal(generator, LAYERS, WIDTH) + 1, activation)


def gain_layer(generator: Generator, *, gain: float) -> ZooProblem:
    """tanh layer with weights N(0, gain^2 / D): the plain map turns chaotic near 1.5."""
    weight = gain * normal(generator, LAYERS, WIDTH, WIDTH) / WIDTH**0.5
    problem = _layer(weight, normal(generator, LAYERS, WIDTH), "tanh")
    source = "H. Sompolinsky, A. Crisanti, H. Sommers, Phys. Rev. Lett. 61 (1988) 259"
    return replace(problem, source=source, reference=None)


def _layer(weight: Tensor, injection: Tensor, activation: str) -> ZooProblem:
    f = partial(dense_layer, activation=activation)
    z0 = torch.zeros_like(injection)
    return ZooProblem(
        f=f, z0=z0, args=(weight, injection), symmetric=False,
        source="S. Bai, J. Z. Kolter, V. Koltun, Deep Equilibrium Models (2019)",
        reference=lambda: contraction(f, z0, (weight, injection), 1000),
    )  # fmt: skip


MAP_BUILDS: dict[str, Build] = {
    "cos": cosine,
    "kepler": kepler,
    "two_fixed_points": two_fixed_points,
    "heron": heron,
    "logistic_cycle": logistic_cycle,
    "h_equation": h_equation,
    "bellman": bellman,
    "soft_threshold": shrinkage,
    "tanh_0.9": partial(layer, activation="tanh", norm=0.9),
    "tanh_gain_1.2": partial(gain_layer, gain=1.2),
    "tanh_gain_1.75": partial(gain_layer, gain=1.75),
    "relu_0.9": partial(layer, activation="relu", norm=0.9),
    "relu_symmetric_0.98": partial(symmetric_layer, activation="relu", radius=0.98),
}


def quadratic(generator: Generator, *, condition: float) -> ZooProblem:
    """Convex quadratic, Hessian eigenvalues log-spaced in [1 / condition, 1], minimum N(0, 1)."""
    batch, dim = 6, 40
    curvature = torch.logspace(0, -1, dim, base=condition, dtype=torch.float64).repeat(batch, 1)
    matrix = symmetric_matrix(generator, 1 - curvature)
    minimiser = normal(generator, batch, dim)
    offset = minimiser - matvec(matrix, minimiser)
    source = "J. Nocedal, S. Wright, Numerical Optimization (2nd ed., 2006), section 3.3"
    z0 = normal(generator, batch, dim)
    return affine_problem(matrix, offset, z0, source)


def valley_energy(z: Tensor, steepness: Tensor) -> Tensor:
    """``V / (20 steepness)`` of the valley ``V = (1 - z1)^2 + steepness (z2 - z1^2)^2``."""
    first, second = z.unbind(1)
    value = (1 - first) ** 2 + steepness[:, 0] * (second - first**2) ** 2
    return value / (20 * steepness[:, 0])


def valley(generator: Generator, *, steepness: float) -> ZooProblem:
    """Rosenbrock's valley (steepness 100 in the original), step below 2 / curvature at (1, 1)."""
    batch = 4
    z0 = torch.tensor([-1.2, 1.0], dtype=torch.float64).repeat(batch, 1)
    z0[1:] += 0.1 * normal(generator, batch - 1, 2)
    args = (torch.full((batch, 1), steepness, dtype=torch.float64),)
    source = "H. Rosenbrock, Computer Journal 3 (1960) 175; " + MGH.format(1)
    return minimised(valley_energy, z0, args, source, reference=lambda: torch.ones_like(z0))


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
    source = "S. Boyd, L. Vandenberghe, Convex Optimization (2004), sections 3.1.5 and 9.2"
    f = descent(log_sum_exp_energy)
    reference = partial(contraction, f, z0, args, 2000)
    return minimised(log_sum_exp_energy, z0, args, source, reference=reference)


def wells_energy(z: Tensor, coupling: Tensor) -> Tensor:
    """``0.2 (sum (z^2 - 1)^2 / 4 + z^T K z / 2)``."""
    return 0.2 * ((z * z - 1).square() / 4 + 0.5 * z * matvec(coupling, z)).sum(1)


def wells(generator: Generator) -> ZooProblem:
    """Coupled double wells, started near the saddle at 0: many minima, more saddles."""
    batch, dim = 6, 20
    raw = normal(generator, batch, dim, dim) / dim**0.5
    coupling = 0.3 * (raw + raw.mT) / 2**0.5
    z0 = 0.05 * normal(generator, batch, dim)
    source = "D. Wales, Energy Landscapes (2003): coupled quartic double wells"
    return minimised(wells_energy, z0, (coupling,), source)


LEAST_SQUARES = {"powell": powell_singular, "helical": helical_valley}


def squares_energy(z: Tensor, origin: Tensor, system: str, step: float) -> Tensor:
    """``step |F(z - o)|^2 / 2``, (B,)."""
    return 0.5 * step * LEAST_SQUARES[system](z - origin).square().sum(1)


def least_squares(
    generator: Generator, *, system: str, start: tuple[float, ...], answer: tuple[float, ...],
    step: float, source: str, origin: float = 0.0, expect: Expect = "converges",
) -> ZooProblem:  # fmt: skip
    """The sum of squares of a system: symmetric where the system itself is not."""
    batch = 4
    z0 = torch.tensor(start, dtype=torch.float64).repeat(batch, 1)
    z0[1:] += 0.1 * normal(generator, batch - 1, len(start))
    moved = torch.full_like(z0, origin)
    return minimised(
        partial(squares_energy, system=system, step=step), z0 + moved, (moved,), source,
        expect=expect, reference=lambda: moved + torch.tensor(answer, dtype=torch.float64),
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
        energy=hopfield_energy,
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
    )  # fmt: skip


def soft_norm(y: Tensor) -> Tensor:
    """``y / sqrt(mean(y^2) + 1)`` along the last dimension."""
    return y * (y.square().mean(-1, keepdim=True) + 1).rsqrt()


def bisoftmax_energy(
    z: Tensor, heads: Tensor, memories: Tensor, x: Tensor, weights: Tensor
) -> Tensor:
    """``a sum_hi lse_j(beta q_i.q_j) / beta - b/2 sum relu(k)^2 + |z - x|^2 / 2``, (B,).

    ``q`` and ``k`` are the soft norms of ``W_h^T z`` and ``D^T z``, ``beta = 1 / sqrt(p)``.
    """
    beta = heads.shape[-1] ** -0.5
    query = soft_norm(torch.einsum("bnd,bhdp->bhnp", z, heads))
    attention = (beta * query @ query.mT).logsumexp(-1).sum((1, 2)) / beta
    key = soft_norm(z @ memories)
    feedforward = -0.5 * key.relu().square().sum((1, 2))
    distance = 0.5 * (z - x).square().sum((1, 2))
    return weights[:, 0] * attention + weights[:, 1] * feedforward + distance


def bisoftmax(generator: Generator, *, attention: float, feedforward: float) -> ZooProblem:
    """16 tokens of dimension 64, 4 heads, 128 memories, standard initialisation, from z = x."""
    batch, tokens, dim, count, memories = 4, 16, 64, 4, 128
    heads = normal(generator, batch, count, dim, dim // count) / dim**0.5
    memory = normal(generator, batch, dim, memories) / dim**0.5
    x = normal(generator, batch, tokens, dim)
    weights = torch.tensor([attention, feedforward], dtype=torch.float64).repeat(batch, 1)
    args = (heads, memory, x, weights)
    source = "Y. Hu, D. Zou, D. Xu, Hyper-SET (arXiv 2502.11646), equations 3 and 7"
    return minimised(bisoftmax_energy, x.clone(), args, source)


ENERGY_BUILDS: dict[str, Build] = {
    "energy_quadratic_10": partial(quadratic, condition=1e1),
    "energy_quadratic_100": partial(quadratic, condition=1e2),
    "energy_quadratic_1e4": partial(quadratic, condition=1e4),
    "energy_rosenbrock_10": partial(valley, steepness=10.0),
    "energy_rosenbrock_100": partial(valley, steepness=100.0),
    "energy_log_sum_exp": log_sum_exp,
    "energy_double_wells": wells,
    "energy_powell_singular": partial(least_squares, system="powell", start=(3.0, -1.0, 0.0, 1.0),
        answer=(0.0, 0.0, 0.0, 0.0), origin=1.0, step=2e-3, source=MGH.format(13)),
    "energy_helical_valley": partial(least_squares, system="helical", start=(-1.0, 0.0, 0.0),
        answer=(1.0, 0.0, 0.0), step=2e-3, source=MGH.format(7)),
    "hopfield_retrieval": partial(hopfield, beta=20.0, noise=0.5),
    "hopfield_metastable": partial(hopfield, beta=7.0, noise=0.5),
    "mean_field": partial(mean_field, gain=1.0),
    "mean_field_strong": partial(mean_field, gain=1.2),
    "energy_bisoftmax_0.2_0.2": partial(bisoftmax, attention=0.2, feedforward=0.2),
    "energy_bisoftmax_0.4_0.2": partial(bisoftmax, attention=0.4, feedforward=0.2),
    "energy_bisoftmax_1.0_0.3": partial(bisoftmax, attention=1.0, feedforward=0.3),
}  # fmt: skip


RUDIN = "W. Rudin, Principles of Mathematical Analysis (3rd ed., 1976), chapter 5, exercise 22"


def outward(z: Tensor, direction: Tensor) -> Tensor:
    """``z + sqrt(|z|^2 + 1) u / 2``, u of length 1."""
    return z + 0.5 * (z.square().sum(1, keepdim=True) + 1).sqrt() * direction


def runaway(generator: Generator) -> ZooProblem:
    """No fixed point, relative residual at least 1/3 everywhere; plain iterates grow by 3/2."""
    direction = normalize(normal(generator, 4, 5), dim=1)
    return ZooProblem(
        f=outward, z0=normal(generator, 4, 5), args=(direction,), symmetric=False,
        expect="diverges", source=RUDIN,
    )  # fmt: skip


def transient_nan(generator: Generator) -> ZooProblem:
    """The full step of the first sample leaves the domain of f; half the step stays inside.

    ``z - c log z`` with the fixed point 1: for c = 4 the plain map repels there and takes the start
    below zero, where f is NaN; for the other samples c < 1 contracts.
    """
    batch, dim = 5, 4
    rate = uniform(generator, 0.3, 0.9, batch, 1)
    rate[0] = 4.0
    z0 = uniform(generator, 2.0, 6.0, batch, dim)
    return ZooProblem(
        f=lambda z, c: z - c * z.log(), z0=z0, args=(rate,), symmetric=True,
        source="S. Boyd, L. Vandenberghe, Convex Optimization (2004), section 9.2: domains",
        reference=lambda: torch.ones_like(z0), energy=lambda z, c: (c * (z * z.log() - z)).sum(1),
    )  # fmt: skip


def nan_from_start(generator: Generator) -> ZooProblem:
    """One sample of five starts where f is NaN; nothing can be done for it, all for the others."""
    problem = transient_nan(generator)
    (rate,) = problem.args
    rate[0] = 0.5
    problem.z0[2, 1] = -1.0
    answer = torch.ones_like(problem.z0)
    answer[2] = torch.nan
    return replace(problem, expect="mixed", reference=lambda: answer)


def constant(generator: Generator) -> ZooProblem:
    """``f(z) = b``: the second evaluation is exact, differences of residuals repeat themselves."""
    value = normal(generator, 4, 6)
    return ZooProblem(
        f=lambda z, b: b + 0 * z, z0=normal(generator, 4, 6), args=(value,), symmetric=True,
        source="S. Banach, Fundamenta Mathematicae 3 (1922) 133: contraction with factor 0",
        reference=value.clone, energy=lambda z, value: 0.5 * (z - value).square().sum(1),
    )  # fmt: skip


def start_at_solution(generator: Generator) -> ZooProblem:
    """A linear contraction whose first two samples start at their fixed points."""
    basis = orthogonal(generator, 5, 12)
    eigenvalues = uniform(generator, -0.5, 0.8, 5, 12)
    matrix = with_spectrum(basis, eigenvalues)
    answer, z0 = normal(generator, 5, 12), normal(generator, 5, 12)
    offset = answer - matvec(matrix, answer)
    z0[:2] = answer[:2]
    source = "scipy, optimize/tests/test_nonlin.py, problem F2_lucky: a start at the root"
    return affine_problem(matrix, offset, z0, source)


PATHOLOGICAL_BUILDS: dict[str, Build] = {
    "runaway": runaway,
    "transient_nan": transient_nan,
    "nan_from_start": nan_from_start,
    "constant": constant,
    "start_at_solution": start_at_solution,
}


BUILDS = LINEAR_BUILDS | MAP_BUILDS | SYSTEM_BUILDS | ENERGY_BUILDS | PATHOLOGICAL_BUILDS


@cache
def _original(name: str, seed: int) -> ZooProblem:
    generator = torch.Generator().manual_seed(seed)
    problem = replace(BUILDS[name](generator), name=name)
    if problem.reference is None:
        return problem
    # solved at most once for all copies in other dtypes
    return replace(problem, reference=cache(problem.reference))


def make(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> ZooProblem:
    """The problem ``name`` in tensors of its own, safe to overwrite."""
    return cast(_original(name, seed), dtype)


PROBLEMS = list(BUILDS)
SOLVABLE = [name for name in PROBLEMS if _original(name, 0).expect == "converges"]

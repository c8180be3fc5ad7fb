"""Fixed-point maps: scalar equations, integral equations, control, sparsity; dense equilibrium layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Generator, Tensor

from problems.linear import symmetric_matrix
from problems.problem import (
    Build,
    ZooProblem,
    check,
    continuation,
    contraction,
    matvec,
    normal,
    uniform,
)


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


def kepler_map(z: Tensor, anomaly: Tensor, eccentricity: Tensor) -> Tensor:
    """``E = M + e sin E``."""
    return anomaly + eccentricity * z.sin()


def kepler_energy(z: Tensor, anomaly: Tensor, eccentricity: Tensor) -> Tensor:
    """``E^2 / 2 - M E + e cos E``."""
    return (0.5 * z * z - anomaly * z + eccentricity * z.cos()).sum(1)


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
        f=kepler_map, z0=anomaly.clone(), args=(anomaly, eccentricity), symmetric=True,
        source="P. Colwell, Solving Kepler's Equation over Three Centuries (1993)",
        reference=reference, energy=kepler_energy,
    )  # fmt: skip


def square_plus(z: Tensor, constant: Tensor) -> Tensor:
    """``z^2 + c``."""
    return z * z + constant


def two_fixed_points(generator: Generator) -> ZooProblem:
    """``z = z^2 + c``: an attracting and a repelling fixed point, started between the two.

    ``z = (1 -+ sqrt(1 - 4 c)) / 2``; the reference is the attracting one.
    """
    constant = uniform(generator, 0.02, 0.2, 8, 1)
    gap = (1 - 4 * constant).sqrt()
    low, high = (1 - gap) / 2, (1 + gap) / 2
    return ZooProblem(
        f=square_plus, z0=low + uniform(generator, 0.3, 0.95, 8, 1) * (high - low),
        args=(constant,), symmetric=True,
        source="R. Devaney, An Introduction to Chaotic Dynamical Systems (1989): quadratic map",
        reference=low.clone, unique=False,
    )  # fmt: skip


def heron_map(z: Tensor, radicand: Tensor) -> Tensor:
    """``(z + a / z) / 2``."""
    return 0.5 * (z + radicand / z)


def heron(generator: Generator) -> ZooProblem:
    """Heron's square root: two attracting fixed points, the sign of the start decides."""
    radicand = uniform(generator, 0.5, 20.0, 8, 1)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(4).unsqueeze(1)
    return ZooProblem(
        f=heron_map, z0=sign * uniform(generator, 0.2, 10.0, 8, 1), args=(radicand,),
        symmetric=True,
        source="Heron of Alexandria, Metrica I.8; P. Henrici, Elements of Numerical Analysis",
        reference=lambda: sign * radicand.sqrt(), unique=False,
    )  # fmt: skip


def logistic_map(z: Tensor, rate: Tensor) -> Tensor:
    """``r z (1 - z)``."""
    return rate * z * (1 - z)


def logistic_cycle(generator: Generator) -> ZooProblem:
    """Rates 3.1 to 3.9: plain iteration cycles or turns chaotic, the answer ``1 - 1/r`` repels."""
    rate = torch.linspace(3.1, 3.9, 6, dtype=torch.float64).unsqueeze(1)
    return ZooProblem(
        f=logistic_map, z0=uniform(generator, 0.4, 0.9, 6, 1), args=(rate,), symmetric=True,
        converges_plain=False, source="R. May, Nature 261 (1976) 459",
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
        reference=lambda: contraction(h_equation_map, z0, (albedo,), 100),
        unique=False,
    )


def bellman_map(z: Tensor, transition: Tensor, reward: Tensor) -> Tensor:
    """``max_a [ r_a + 0.95 P_a z ]``: transition (B, A, S, S), reward (B, A, S)."""
    return (reward + 0.95 * torch.einsum("bast,bt->bas", transition, z)).amax(1)


def bellman(generator: Generator) -> ZooProblem:
    """Value iteration in a random decision process; the reference iterates policies instead."""
    batch, actions, states = 4, 4, 30
    transition = normal(generator, batch, actions, states, states).mul(3).softmax(-1)
    reward = uniform(generator, 0.0, 1.0, batch, actions, states)
    pick_row, pick_state = torch.arange(batch).unsqueeze(1), torch.arange(states)

    def reference() -> Tensor:
        value = torch.zeros(batch, states, dtype=torch.float64)
        for _ in range(50):
            outcome = reward + 0.95 * torch.einsum("bast,bt->bas", transition, value)
            policy = outcome.argmax(1)
            chain = transition[pick_row, policy, pick_state]
            gain = reward[pick_row, policy, pick_state]
            value = torch.linalg.solve(torch.eye(states, dtype=torch.float64) - 0.95 * chain, gain)
        return check(bellman_map, value, (transition, reward))

    return ZooProblem(
        f=bellman_map, z0=torch.zeros(batch, states, dtype=torch.float64),
        args=(transition, reward), symmetric=False,
        source="M. Puterman, Markov Decision Processes (1994), sections 6.3 and 6.4",
        reference=reference,
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


def gain_layer(generator: Generator, *, gain: float, plain: bool) -> ZooProblem:
    """tanh layer with weights N(0, gain^2 / D): the plain map turns chaotic near 1.5.

    The reference follows the fixed point from gain 0.
    """
    weight = gain * normal(generator, LAYERS, WIDTH, WIDTH) / WIDTH**0.5
    problem = _layer(weight, normal(generator, LAYERS, WIDTH), "tanh")
    f, z0, (_, injection) = problem.f, problem.z0, problem.args
    return replace(
        problem, converges_plain=plain,
        source="H. Sompolinsky, A. Crisanti, H. Sommers, Phys. Rev. Lett. 61 (1988) 259",
        reference=lambda: continuation(f, z0, lambda t: (t * weight, injection)), unique=False,
    )  # fmt: skip


def _layer(weight: Tensor, injection: Tensor, activation: str) -> ZooProblem:
    f = partial(dense_layer, activation=activation)
    z0 = torch.zeros_like(injection)
    return ZooProblem(
        f=f, z0=z0, args=(weight, injection), symmetric=False,
        source="S. Bai, J. Z. Kolter, V. Koltun, Deep Equilibrium Models (2019)",
        reference=lambda: contraction(f, z0, (weight, injection), 1000),
    )  # fmt: skip


BUILDS: dict[str, Build] = {
    "cos": cosine,
    "kepler": kepler,
    "two_fixed_points": two_fixed_points,
    "heron": heron,
    "logistic_cycle": logistic_cycle,
    "h_equation": h_equation,
    "bellman": bellman,
    "soft_threshold": shrinkage,
    "tanh_0.9": partial(layer, activation="tanh", norm=0.9),
    "tanh_gain_1.2": partial(gain_layer, gain=1.2, plain=True),
    "tanh_gain_1.75": partial(gain_layer, gain=1.75, plain=False),
    "relu_0.9": partial(layer, activation="relu", norm=0.9),
    "relu_symmetric_0.98": partial(symmetric_layer, activation="relu", radius=0.98),
}

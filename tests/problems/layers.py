"""Dense equilibrium layers ``z = phi(W z + x)``, smooth and with kinks, calm and chaotic."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Generator, Tensor

from problems.linear import symmetric_matrix
from problems.problem import Build, ZooProblem, matvec, normal, uniform
from problems.reference import continuation, contraction

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
    "tanh_0.9": partial(layer, activation="tanh", norm=0.9),
    "tanh_gain_1.2": partial(gain_layer, gain=1.2, plain=True),
    "tanh_gain_1.75": partial(gain_layer, gain=1.75, plain=False),
    "relu_0.9": partial(layer, activation="relu", norm=0.9),
    "relu_symmetric_0.98": partial(symmetric_layer, activation="relu", radius=0.98),
}

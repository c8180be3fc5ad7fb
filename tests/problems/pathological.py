"""Maps without a fixed point, maps that leave their domain, and samples that spoil a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Generator, Tensor

from problems.linear import affine_problem, with_spectrum
from problems.problem import Build, Expect, ZooProblem, matvec, normal, orthogonal, uniform

RUDIN = "W. Rudin, Principles of Mathematical Analysis (3rd ed., 1976), chapter 5, exercise 22"


def add(z: Tensor, offset: Tensor) -> Tensor:
    """``z + b``."""
    return z + offset


def translation(generator: Generator) -> ZooProblem:
    """``z + b``: no fixed point; the absolute residual is ``|b|`` everywhere.

    The relative residual falls as 1 / |z|, so a solver that leaps far enough meets any relative
    tolerance; :func:`runaway` is the map for which it cannot.
    """
    return _hopeless(add, normal(generator, 4, 5), (normal(generator, 4, 5),), "diverges")


def outward(z: Tensor, direction: Tensor) -> Tensor:
    """``z + sqrt(|z|^2 + 1) u / 2``, u of length 1."""
    return z + 0.5 * (z.square().sum(1, keepdim=True) + 1).sqrt() * direction


def runaway(generator: Generator) -> ZooProblem:
    """No fixed point, relative residual at least 1/3 everywhere; plain iterates grow by 3/2."""
    direction = torch.nn.functional.normalize(normal(generator, 4, 5), dim=1)
    return _hopeless(outward, normal(generator, 4, 5), (direction,), "diverges")


def exponential(generator: Generator) -> ZooProblem:
    """``exp z``: no real fixed point, overflows within a few steps."""
    return _hopeless(torch.exp, normal(generator, 4, 3), (), "nonfinite")


def logarithm(generator: Generator) -> ZooProblem:
    """``log z``: no real fixed point; from positive starts NaN within a few steps."""
    return _hopeless(torch.log, uniform(generator, 2.0, 50.0, 4, 3), (), "nonfinite")


def _hopeless(
    f: Callable[..., Tensor], z0: Tensor, args: tuple[Tensor, ...], expect: Expect
) -> ZooProblem:
    return ZooProblem(
        f=f, z0=z0, args=args, symmetric=f is not outward, converges_plain=False, expect=expect,
        source=RUDIN,
    )  # fmt: skip


def barrier_map(z: Tensor, rate: Tensor) -> Tensor:
    """``z - c log z``, NaN for negative z: rate c (B, 1)."""
    return z - rate * z.log()


def barrier_energy(z: Tensor, rate: Tensor) -> Tensor:
    """``c sum (z log z - z)``, NaN for negative z."""
    return (rate * (z * z.log() - z)).sum(1)


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
        f=barrier_map, z0=z0, args=(rate,), symmetric=True, converges_plain=False,
        source="S. Boyd, L. Vandenberghe, Convex Optimization (2004), section 9.2: domains",
        reference=lambda: torch.ones_like(z0), energy=barrier_energy,
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


def constant_map(z: Tensor, value: Tensor) -> Tensor:
    """``b``, whatever z."""
    return value + 0 * z


def constant(generator: Generator) -> ZooProblem:
    """``f(z) = b``: the second evaluation is exact, differences of residuals repeat themselves."""
    value = normal(generator, 4, 6)
    return ZooProblem(
        f=constant_map, z0=normal(generator, 4, 6), args=(value,), symmetric=True,
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


BUILDS: dict[str, Build] = {
    "translation": translation,
    "runaway": runaway,
    "exponential": exponential,
    "logarithm": logarithm,
    "transient_nan": transient_nan,
    "nan_from_start": nan_from_start,
    "constant": constant,
    "start_at_solution": start_at_solution,
}

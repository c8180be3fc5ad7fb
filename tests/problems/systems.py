"""The systems of scipy's tests and of Moré, Garbow and Hillstrom, posed as fixed points.

``f(z) = z - c F(z - o)``. The number c is chosen so that the plain iteration contracts at the root
where one number can do that. The origin o moves a root at zero away from it, because a relative
residual has no scale there; elsewhere it is zero. The first sample starts at the published point
x0, the others at ``x0 + 0.1 |x0|_inf * noise``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from scipy.optimize import brentq
from torch import Generator, Tensor

from problems import nonlinear_systems as systems
from problems.problem import Build, Expect, Problem, normal
from problems.reference import newton, root

BATCH = 4
SCIPY = "scipy, optimize/tests/test_nonlin.py, problem {}"
MGH = "J. Moré, B. Garbow, K. Hillstrom, ACM Trans. Math. Softw. 7 (1981) 17, problem {}"


@dataclass(frozen=True)
class Relaxation:
    """``f(z, origin) = z - factor * F(z - origin)`` for a system F: (B, n) -> (B, n)."""

    system: Callable[[Tensor], Tensor]
    factor: float

    def __call__(self, z: Tensor, origin: Tensor) -> Tensor:
        return z - self.factor * self.system(z - origin)


@dataclass(frozen=True)
class Potential:
    """``energy(z, origin) = factor * V(z - origin)``, whose gradient is ``z - f(z)`` if V' = F."""

    potential: Callable[[Tensor], Tensor]
    factor: float

    def __call__(self, z: Tensor, origin: Tensor) -> Tensor:
        return self.factor * self.potential(z - origin)


def pose(
    generator: Generator,
    *,
    system: Callable[[Tensor], Tensor],
    start: Tensor,
    factor: float,
    source: str,
    origin: float = 0.0,
    potential: Callable[[Tensor], Tensor] | None = None,
    converges_plain: bool = True,
    expect: Expect = "converges",
    unique: bool = True,
    solve: Callable[..., Tensor] | None = root,
) -> Problem:
    """The system as a problem; ``solve=None`` says that its root is exactly 0."""
    f = Relaxation(system, factor)
    noise = normal(generator, BATCH, start.numel())
    noise[0] = 0
    moved = torch.full_like(noise, origin)
    z0 = moved + start + 0.1 * start.abs().max() * noise

    def reference() -> Tensor:
        return moved.clone() if solve is None else solve(f, z0, (moved,))

    return Problem(
        name="",
        f=f,
        z0=z0,
        args=(moved,),
        symmetric=potential is not None,
        converges_plain=converges_plain,
        expect=expect,
        source=source,
        reference=reference,
        energy=None if potential is None else Potential(potential, factor),
        unique=unique,
    )


def point(*values: float) -> Tensor:
    """A published starting point."""
    return torch.tensor(values, dtype=torch.float64)


def full(n: int, value: float) -> Tensor:
    """The starting point with n equal coordinates."""
    return torch.full((n,), value, dtype=torch.float64)


def interior(n: int) -> Tensor:
    """``t_i = i / (n + 1)``."""
    return torch.arange(1, n + 1, dtype=torch.float64) / (n + 1)


def from_plain(f: Relaxation, z: Tensor, args: tuple[Tensor, ...]) -> Tensor:
    """Newton's method from a point that 100 plain iterations found.

    From the published start MINPACK's hybrid method ends in another root, or for the trigonometric
    system in a minimum of |F| that is no root.
    """
    for _ in range(100):
        z = f(z, *args)
    return newton(f, z, args)


def powell_root(f: Relaxation, z: Tensor, args: tuple[Tensor, ...]) -> Tensor:
    """The root of Powell's badly scaled system: ``x1 = 1e-4 / x2`` leaves one scalar equation."""

    def second(x: float) -> float:
        return math.exp(-1e-4 / x) + math.exp(-x) - 1.0001

    x = float(brentq(second, 5.0, 15.0, xtol=1e-14))  # pyright: ignore[reportArgumentType]
    return newton(f, torch.tensor([[1e-4 / x, x]], dtype=z.dtype).expand_as(z), args)


def parabola(n: int) -> Tensor:
    """``t_i (t_i - 1)``, the start of MGH 28 and 29."""
    return interior(n) * (interior(n) - 1)


SCIPY_BUILDS: dict[str, Build] = {
    "scipy_F_cubic": partial(
        pose,
        system=systems.cubic,
        potential=systems.cubic_potential,
        start=full(5, 1.0),
        factor=0.4,
        origin=1.0,
        solve=None,
        source=SCIPY.format("F"),
    ),
    "scipy_F2_identity": partial(
        pose,
        system=systems.identity,
        potential=systems.identity_potential,
        start=point(1, 2, 3, 4, 5, 6),
        factor=0.5,
        origin=1.0,
        solve=None,
        source=SCIPY.format("F2"),
    ),
    "scipy_F3_tridiagonal": partial(
        pose,
        system=systems.tridiagonal,
        potential=systems.tridiagonal_potential,
        start=point(1, 2, 3),
        factor=-0.5,
        source=SCIPY.format("F3"),
    ),
    "scipy_F4_powell_badly_scaled": partial(
        pose,
        system=systems.powell_badly_scaled,
        start=point(-1, -2),
        factor=1.0,
        solve=powell_root,
        converges_plain=False,
        expect="hard",
        unique=False,
        source=SCIPY.format("F4_powell"),
    ),
    "scipy_F5_pressure_network": partial(
        pose,
        system=systems.pressure_network,
        start=point(2, 0, 2, 0),
        factor=0.25,
        solve=from_plain,
        unique=False,
        source=SCIPY.format("F5"),
    ),
    "scipy_F6": partial(
        pose,
        system=systems.scipy_f6,
        start=point(-0.5, 1.4),
        factor=-0.8,
        unique=False,
        source=SCIPY.format("F6"),
    ),
}

MGH_BUILDS: dict[str, Build] = {
    "mgh_rosenbrock": partial(
        pose,
        system=systems.rosenbrock,
        start=point(-1.2, 1.0),
        factor=0.1,
        source=MGH.format(1),
    ),
    "mgh_powell_badly_scaled": partial(
        pose,
        system=systems.powell_badly_scaled,
        start=point(0, 1),
        factor=1.0,
        converges_plain=False,
        solve=powell_root,
        expect="hard",
        unique=False,
        source=MGH.format(3),
    ),
    "mgh_helical_valley": partial(
        pose,
        system=systems.helical_valley,
        start=point(-1, 0, 0),
        factor=0.1,
        converges_plain=False,
        expect="hard",
        source=MGH.format(7),
    ),
    "mgh_powell_singular": partial(
        pose,
        system=systems.powell_singular,
        start=point(3, -1, 0, 1),
        factor=0.1,
        origin=1.0,
        solve=None,
        converges_plain=False,
        expect="hard",
        source=MGH.format(13),
    ),
    "mgh_trigonometric": partial(
        pose,
        system=systems.trigonometric,
        start=full(10, 0.1),
        factor=-1.0,
        origin=1.0,
        solve=from_plain,
        unique=False,
        source=MGH.format(26),
    ),
    "mgh_brown_almost_linear": partial(
        pose,
        system=systems.brown_almost_linear,
        start=full(10, 0.5),
        factor=0.15,
        solve=from_plain,
        unique=False,
        source=MGH.format(27),
    ),
    "mgh_discrete_boundary_value": partial(
        pose,
        system=systems.discrete_boundary_value,
        potential=systems.boundary_value_potential,
        start=parabola(10),
        factor=0.4,
        source=MGH.format(28),
    ),
    "mgh_discrete_integral": partial(
        pose,
        system=systems.discrete_integral,
        start=parabola(10),
        factor=1.0,
        source=MGH.format(29),
    ),
    "mgh_broyden_tridiagonal": partial(
        pose,
        system=systems.broyden_tridiagonal,
        start=full(10, -1.0),
        factor=0.15,
        unique=False,
        source=MGH.format(30),
    ),
    "mgh_broyden_banded": partial(
        pose,
        system=systems.broyden_banded,
        start=full(10, -1.0),
        factor=0.1,
        source=MGH.format(31),
    ),
    "mgh_chebyquad": partial(
        pose,
        system=systems.chebyquad,
        start=interior(5),
        factor=0.3,
        converges_plain=False,
        expect="hard",
        unique=False,
        source=MGH.format(35),
    ),
}

BUILDS = {**SCIPY_BUILDS, **MGH_BUILDS}

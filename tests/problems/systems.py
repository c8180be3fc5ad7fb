"""The systems of scipy's tests and of Moré, Garbow and Hillstrom, posed as fixed points.

``f(z) = z - c F(z - o)``. The number c is chosen so that the plain iteration contracts at the root
where one number can do that. The origin o moves a root at zero away from it, because a relative
residual has no scale there; elsewhere it is zero. The first sample starts at the published point
x0, the others at ``x0 + 0.1 |x0|_inf * noise``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from problems import nonlinear_systems as systems
from problems.nonlinear_systems import MGH, SCIPY
from problems.problem import Build, ZooProblem, normal
from problems.reference import newton, root

BATCH = 4


def posed(
    source: str, system: Callable[[Tensor], Tensor], start: Tensor, factor: float, *,
    origin: float = 0.0, potential: Callable[[Tensor], Tensor] | None = None,
    solve: Callable[..., Tensor] | None = root, **other: Any,
) -> Build:  # fmt: skip
    """``f(z, origin) = z - factor F(z - origin)``, with ``factor V(z - origin)`` for V' = F.

    ``solve=None`` says that the root is exactly 0; ``other`` are further fields of the problem.
    """

    def f(z: Tensor, origin: Tensor) -> Tensor:
        return z - factor * system(z - origin)

    def energy(z: Tensor, origin: Tensor) -> Tensor:
        assert potential is not None
        return factor * potential(z - origin)

    def build(generator: Generator) -> ZooProblem:
        noise = normal(generator, BATCH, start.numel())
        noise[0] = 0
        moved = torch.full_like(noise, origin)
        z0 = moved + start + 0.1 * start.abs().max() * noise

        def reference() -> Tensor:
            return moved.clone() if solve is None else solve(f, z0, (moved,))

        return ZooProblem(
            f=f, z0=z0, args=(moved,), symmetric=potential is not None, source=source,
            reference=reference, energy=None if potential is None else energy, **other,
        )  # fmt: skip

    return build


def point(*values: float) -> Tensor:
    """A published starting point."""
    return torch.tensor(values, dtype=torch.float64)


def full(n: int, value: float) -> Tensor:
    """The starting point with n equal coordinates."""
    return torch.full((n,), value, dtype=torch.float64)


def interior(n: int) -> Tensor:
    """``t_i = i / (n + 1)``."""
    return torch.arange(1, n + 1, dtype=torch.float64) / (n + 1)


def from_plain(f: Callable[..., Tensor], z: Tensor, args: tuple[Tensor, ...]) -> Tensor:
    """Newton's method from a point that 100 plain iterations found.

    From the published start MINPACK's hybrid method ends in another root, or for the trigonometric
    system in a minimum of |F| that is no root.
    """
    for _ in range(100):
        z = f(z, *args)
    return newton(f, z, args)


def parabola(n: int) -> Tensor:
    """``t_i (t_i - 1)``, the start of MGH 28 and 29."""
    return interior(n) * (interior(n) - 1)


BUILDS: dict[str, Build] = {
    "scipy_F_cubic": posed(SCIPY.format("F"), systems.cubic, full(5, 1.0), 0.4,
        potential=systems.cubic_potential, origin=1.0, solve=None),
    "scipy_F2_identity": posed(SCIPY.format("F2"), systems.identity, point(1, 2, 3, 4, 5, 6), 0.5,
        potential=systems.identity_potential, origin=1.0, solve=None),
    "scipy_F3_tridiagonal": posed(SCIPY.format("F3"), systems.tridiagonal, point(1, 2, 3), -0.5,
        potential=systems.tridiagonal_potential),
    "scipy_F5_pressure_network": posed(SCIPY.format("F5"), systems.pressure_network, point(2, 0, 2,
        0), 0.25, solve=from_plain, unique=False),
    "scipy_F6": posed(SCIPY.format("F6"), systems.scipy_f6, point(-0.5, 1.4), -0.8, unique=False),
    "mgh_rosenbrock": posed(MGH.format(1), systems.rosenbrock, point(-1.2, 1.0), 0.1),
    "mgh_trigonometric": posed(MGH.format(26), systems.trigonometric, full(10, 0.1), -1.0,
        origin=1.0, solve=from_plain, unique=False),
    "mgh_brown_almost_linear": posed(MGH.format(27), systems.brown_almost_linear, full(10, 0.5),
        0.15, solve=from_plain, unique=False),
    "mgh_discrete_boundary_value": posed(MGH.format(28), systems.discrete_boundary_value,
        parabola(10), 0.4, potential=systems.boundary_value_potential),
    "mgh_discrete_integral": posed(MGH.format(29), systems.discrete_integral, parabola(10), 1.0),
    "mgh_broyden_tridiagonal": posed(MGH.format(30), systems.broyden_tridiagonal, full(10, -1.0),
        0.15, unique=False),
    "mgh_broyden_banded": posed(MGH.format(31), systems.broyden_banded, full(10, -1.0), 0.1),
}  # fmt: skip

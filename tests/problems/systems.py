"""Nonlinear systems F(x) = 0 of scipy's tests and of Moré, Garbow and Hillstrom (MGH), posed as fixed points.

Each takes x (B, n) to F(x) (B, n), row by row; each ``*_potential`` takes it to a function (B,) of
which F is the gradient. scipy: optimize/tests/test_nonlin.py. MGH: J. Moré, B. Garbow, K.
Hillstrom, "Testing unconstrained optimization software", ACM Trans. Math. Softw. 7 (1981) 17.

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

from problems.problem import Build, ZooProblem, newton, normal, root

SCIPY = "scipy, optimize/tests/test_nonlin.py, problem {}"
MGH = "J. Moré, B. Garbow, K. Hillstrom, ACM Trans. Math. Softw. 7 (1981) 17, problem {}"


def cubic(x: Tensor) -> Tensor:
    """scipy F with the sign turned: ``d x + 0.01 |x|^2 x``, d = (3, 2, 1.5, 1, 0.5)."""
    diagonal = x.new_tensor([3.0, 2.0, 1.5, 1.0, 0.5])
    return diagonal * x + 0.01 * (x * x).sum(1, keepdim=True) * x


def cubic_potential(x: Tensor) -> Tensor:
    """Potential of :func:`cubic`."""
    diagonal = x.new_tensor([3.0, 2.0, 1.5, 1.0, 0.5])
    square = (x * x).sum(1)
    return 0.5 * (diagonal * x * x).sum(1) + 0.0025 * square * square


def identity(x: Tensor) -> Tensor:
    """scipy F2."""
    return x


def identity_potential(x: Tensor) -> Tensor:
    """Potential of :func:`identity`."""
    return 0.5 * (x * x).sum(1)


def tridiagonal(x: Tensor) -> Tensor:
    """scipy F3: ``A x - b``, A = tridiag(1, -2, 1), b = (1, 2, 3)."""
    return shift_down(x) - 2 * x + shift_up(x) - x.new_tensor([1.0, 2.0, 3.0])


def tridiagonal_potential(x: Tensor) -> Tensor:
    """Potential of :func:`tridiagonal`."""
    offset = x.new_tensor([1.0, 2.0, 3.0])
    return 0.5 * (x * (tridiagonal(x) - offset)).sum(1)


def powell_badly_scaled(x: Tensor) -> Tensor:
    """scipy F4 and MGH 3: ``1e4 x1 x2 - 1``, ``exp(-x1) + exp(-x2) - 1.0001``."""
    product = 1e4 * x[:, 0] * x[:, 1] - 1
    return torch.stack([product, torch.exp(-x).sum(1) - 1.0001], 1)


def pressure_network(x: Tensor) -> Tensor:
    """scipy F5: flows x in four parallel pipes; equal drops ``x_i^2 / 2`` and a total flow of 4."""
    drop = 0.5 * x * x
    return torch.cat([x.sum(1, keepdim=True) - 4, drop[:, 1:] - drop[:, :1]], 1)


def scipy_f6(x: Tensor) -> Tensor:
    """scipy F6: ``-J0^-1 ((x1+3)(x2^5-7) + 18, sin(x2 exp(x1) - 1))``."""
    first = (x[:, 0] + 3) * (x[:, 1] ** 5 - 7) + 18
    second = torch.sin(x[:, 1] * torch.exp(x[:, 0]) - 1)
    a, b, c, d = -4.256, 14.7, 0.8394989, 0.59964207
    determinant = a * d - b * c
    return -torch.stack([d * first - b * second, a * second - c * first], 1) / determinant


def rosenbrock(x: Tensor) -> Tensor:
    """MGH 1 with its two equations exchanged and the first one's sign turned."""
    return torch.stack([x[:, 0] - 1, 10 * (x[:, 1] - x[:, 0] ** 2)], 1)


def helical_valley(x: Tensor) -> Tensor:
    """MGH 7 in the order f2, f3, f1; the angle in turns, from -1/4 to 3/4.

    The paper's angle, atan(x2 / x1) with 1/2 added for negative x1, is cut along x1 = 0, x2 < 0.
    """
    radius = x[:, :2].norm(dim=1)
    turns = torch.atan2(x[:, 1], x[:, 0]) / (2 * torch.pi)
    turns = torch.where(turns < -0.25, turns + 1, turns)
    return torch.stack([10 * (radius - 1), x[:, 2], 10 * (x[:, 2] - 10 * turns)], 1)


def powell_singular(x: Tensor) -> Tensor:
    """MGH 13: a root at 0 where the Jacobian has rank two."""
    a, b, c, d = x.unbind(1)
    last = 10**0.5 * (a - d) ** 2
    return torch.stack([a + 10 * b, 5**0.5 * (c - d), (b - 2 * c) ** 2, last], 1)


def trigonometric(x: Tensor) -> Tensor:
    """MGH 26: ``n - sum cos x_j + i (1 - cos x_i) - sin x_i``."""
    n = x.shape[1]
    i = torch.arange(1, n + 1, dtype=x.dtype, device=x.device)
    cosine = x.cos()
    return n - cosine.sum(1, keepdim=True) + i * (1 - cosine) - x.sin()


def brown_almost_linear(x: Tensor) -> Tensor:
    """MGH 27: ``x_i + sum x_j - (n + 1)`` for i < n, ``prod x_j - 1``."""
    linear = x + x.sum(1, keepdim=True) - (x.shape[1] + 1)
    return torch.cat([linear[:, :-1], x.prod(1, keepdim=True) - 1], 1)


def discrete_boundary_value(x: Tensor) -> Tensor:
    """MGH 28: ``2 x_i - x_{i-1} - x_{i+1} + h^2 (x_i + t_i + 1)^3 / 2``."""
    h, t = grid(x)
    return 2 * x - shift_down(x) - shift_up(x) + h * h * (x + t + 1) ** 3 / 2


def boundary_value_potential(x: Tensor) -> Tensor:
    """Potential of :func:`discrete_boundary_value`."""
    h, t = grid(x)
    stiffness = 0.5 * (x * (2 * x - shift_down(x) - shift_up(x))).sum(1)
    return stiffness + (h * h * (x + t + 1) ** 4 / 8).sum(1)


def discrete_integral(x: Tensor) -> Tensor:
    """MGH 29: the same boundary value problem through its Green's function."""
    h, t = grid(x)
    cube = (x + t + 1) ** 3
    below = (t * cube).cumsum(1)
    above = ((1 - t) * cube).flip(1).cumsum(1).flip(1) - (1 - t) * cube
    return x + h / 2 * ((1 - t) * below + t * above)


def broyden_tridiagonal(x: Tensor) -> Tensor:
    """MGH 30: ``(3 - 2 x_i) x_i - x_{i-1} - 2 x_{i+1} + 1``."""
    return (3 - 2 * x) * x - shift_down(x) - 2 * shift_up(x) + 1


def broyden_banded(x: Tensor) -> Tensor:
    """MGH 31: ``x_i (2 + 5 x_i^2) + 1 - sum_j x_j (1 + x_j)``, j from i-5 to i+1 without i."""
    term = x * (1 + x)
    padded = torch.nn.functional.pad(term, (5, 1))
    window = padded.unfold(1, 7, 1).sum(2) - term
    return x * (2 + 5 * x * x) + 1 - window


def chebyquad(x: Tensor) -> Tensor:
    """MGH 35: mean of the i-th Chebyshev polynomial of [0, 1] over the x_j less its integral."""
    n = x.shape[1]
    y = 2 * x - 1
    previous, current = torch.ones_like(y), y
    equations = []
    for i in range(1, n + 1):
        integral = 0.0 if i % 2 else -1.0 / (i * i - 1)
        equations.append(current.mean(1) - integral)
        previous, current = current, 2 * y * current - previous
    return torch.stack(equations, 1)


def grid(x: Tensor) -> tuple[float, Tensor]:
    """Spacing ``h = 1 / (n + 1)`` and the points ``t_i = i h``."""
    n = x.shape[1]
    h = 1.0 / (n + 1)
    return h, h * torch.arange(1, n + 1, dtype=x.dtype, device=x.device)


def shift_down(x: Tensor) -> Tensor:
    """``x_{i-1}``, zero at the edge."""
    return torch.nn.functional.pad(x[:, :-1], (1, 0))


def shift_up(x: Tensor) -> Tensor:
    """``x_{i+1}``, zero at the edge."""
    return torch.nn.functional.pad(x[:, 1:], (0, 1))


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
    "scipy_F_cubic": posed(SCIPY.format("F"), cubic, full(5, 1.0), 0.4,
        potential=cubic_potential, origin=1.0, solve=None),
    "scipy_F2_identity": posed(SCIPY.format("F2"), identity, point(1, 2, 3, 4, 5, 6), 0.5,
        potential=identity_potential, origin=1.0, solve=None),
    "scipy_F3_tridiagonal": posed(SCIPY.format("F3"), tridiagonal, point(1, 2, 3), -0.5,
        potential=tridiagonal_potential),
    "scipy_F5_pressure_network": posed(SCIPY.format("F5"), pressure_network, point(2, 0, 2,
        0), 0.25, solve=from_plain, unique=False),
    "scipy_F6": posed(SCIPY.format("F6"), scipy_f6, point(-0.5, 1.4), -0.8, unique=False),
    "mgh_rosenbrock": posed(MGH.format(1), rosenbrock, point(-1.2, 1.0), 0.1),
    "mgh_trigonometric": posed(MGH.format(26), trigonometric, full(10, 0.1), -1.0,
        origin=1.0, solve=from_plain, unique=False),
    "mgh_brown_almost_linear": posed(MGH.format(27), brown_almost_linear, full(10, 0.5),
        0.15, solve=from_plain, unique=False),
    "mgh_discrete_boundary_value": posed(MGH.format(28), discrete_boundary_value,
        parabola(10), 0.4, potential=boundary_value_potential),
    "mgh_discrete_integral": posed(MGH.format(29), discrete_integral, parabola(10), 1.0),
    "mgh_broyden_tridiagonal": posed(MGH.format(30), broyden_tridiagonal, full(10, -1.0),
        0.15, unique=False),
    "mgh_broyden_banded": posed(MGH.format(31), broyden_banded, full(10, -1.0), 0.1),
}  # fmt: skip

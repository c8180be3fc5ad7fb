"""Nonlinear systems of scipy's tests and of Moré, Garbow and Hillstrom, for the zoo; 70 collected problems.

Each system takes x (B, n) to F(x) (B, n), row by row; each ``*_potential`` takes it to a function (B,) of
which F is the gradient. scipy: optimize/tests/test_nonlin.py. MGH: J. Moré, B. Garbow, K. Hillstrom,
"Testing unconstrained optimization software", ACM Trans. Math. Softw. 7 (1981) 17. The 70 problems are
in their sources' own words: neither rescaled nor reordered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from scipy.special import lambertw
from torch import Generator, Tensor

import solvers
from problems import Build, ZooProblem, contraction, newton, normal

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
    """Drops ``k x_i^2`` of four parallel pipes (k = 1/2) less the first one's; a total flow of 4."""
    drop = 0.5 * x * x
    return torch.cat([drop[:, 1:] - drop[:, :1], x.sum(1, keepdim=True) - 4], 1)


def scipy_f6(x: Tensor) -> Tensor:
    """scipy F6: ``-J0^-1 ((x1+3)(x2^5-7) + 18, sin(x2 exp(x1) - 1))``."""
    first = (x[:, 0] + 3) * (x[:, 1] ** 5 - 7) + 18
    second = torch.sin(x[:, 1] * torch.exp(x[:, 0]) - 1)
    a, b, c, d = -4.256, 14.7, 0.8394989, 0.59964207
    determinant = a * d - b * c
    return -torch.stack([d * first - b * second, a * second - c * first], 1) / determinant


def rosenbrock(x: Tensor) -> Tensor:
    """MGH 1: ``10 (x_2 - x_1^2)``, ``1 - x_1``."""
    return torch.stack([10 * (x[:, 1] - x[:, 0] ** 2), 1 - x[:, 0]], 1)


def helical_valley(x: Tensor) -> Tensor:
    """MGH 7: ``10 (x_3 - 10 theta)``, ``10 (r - 1)``, ``x_3``; theta in turns, from -1/4 to 3/4.

    The paper's angle, atan(x2 / x1) with 1/2 added for negative x1, is cut along x1 = 0, x2 < 0.
    """
    radius = x[:, :2].norm(dim=1)
    turns = torch.atan2(x[:, 1], x[:, 0]) / (2 * torch.pi)
    turns = torch.where(turns < -0.25, turns + 1, turns)
    return torch.stack([10 * (x[:, 2] - 10 * turns), 10 * (radius - 1), x[:, 2]], 1)


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


def even(n: int) -> list[float]:
    """``i / (n + 1)``."""
    return [i / (n + 1) for i in range(1, n + 1)]


def parabola(n: int) -> list[float]:
    """``t_i (t_i - 1)``."""
    return [t * (t - 1) for t in even(n)]


def reordered(system: Callable[[Tensor], Tensor], *order: int) -> Callable[[Tensor], Tensor]:
    """The equations of a system in another order, counted from 1; less than 0: with the sign turned."""

    def moved(x: Tensor) -> Tensor:
        equations = system(x).unbind(1)
        return torch.stack([math.copysign(1, n) * equations[abs(n) - 1] for n in order], 1)

    return moved


BATCH = 4


def posed(
    source: str, system: Callable[[Tensor], Tensor], start: Sequence[float], factor: float, *,
    origin: float = 0.0, potential: Callable[[Tensor], Tensor] | None = None,
    solve: Callable[..., Tensor] | None = newton, **other: Any,
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
        first = torch.tensor(start, dtype=torch.float64)
        noise = normal(generator, BATCH, len(start))
        noise[0] = 0
        moved = torch.full_like(noise, origin)
        z0 = moved + first + 0.1 * first.abs().max() * noise

        def reference() -> Tensor:
            return moved.clone() if solve is None else solve(f, z0, (moved,))

        return ZooProblem(
            f=f, z0=z0, args=(moved,), symmetric=potential is not None, source=source,
            reference=reference, energy=None if potential is None else energy, **other,
        )  # fmt: skip

    return build


# From the published start Newton's method ends in another root, or for the trigonometric system in a minimum
# of |F| that is no root.
from_plain = partial(contraction, steps=100)

BUILDS: dict[str, Build] = {
    "scipy_F_cubic": posed(SCIPY.format("F"), cubic, 5 * [1.0], 0.4,
        potential=cubic_potential, origin=1.0, solve=None),
    "scipy_F2_identity": posed(SCIPY.format("F2"), identity, [1, 2, 3, 4, 5, 6], 0.5,
        potential=identity_potential, origin=1.0, solve=None),
    "scipy_F3_tridiagonal": posed(SCIPY.format("F3"), tridiagonal, [1, 2, 3], -0.5,
        potential=tridiagonal_potential),
    "scipy_F5_pressure_network": posed(SCIPY.format("F5"), reordered(pressure_network, 4, 1, 2, 3),
        [2.0, 0, 2, 0], 0.25, solve=from_plain, unique=False),
    "scipy_F6": posed(SCIPY.format("F6"), scipy_f6, [-0.5, 1.4], -0.8, unique=False),
    "mgh_rosenbrock": posed(MGH.format(1), reordered(rosenbrock, -2, 1), [-1.2, 1.0], 0.1),
    "mgh_trigonometric": posed(MGH.format(26), trigonometric, 10 * [0.1], -1.0,
        origin=1.0, solve=from_plain, unique=False),
    "mgh_brown_almost_linear": posed(MGH.format(27), brown_almost_linear, 10 * [0.5],
        0.15, solve=from_plain, unique=False),
    "mgh_discrete_boundary_value": posed(MGH.format(28), discrete_boundary_value,
        parabola(10), 0.4, potential=boundary_value_potential),
    "mgh_discrete_integral": posed(MGH.format(29), discrete_integral, parabola(10), 1.0),
    "mgh_broyden_tridiagonal": posed(MGH.format(30), broyden_tridiagonal, 10 * [-1.0],
        0.15, unique=False),
    "mgh_broyden_banded": posed(MGH.format(31), broyden_banded, 10 * [-1.0], 0.1),
}  # fmt: skip


Kind = Literal["map", "system", "minimiser"]
TOLERANCE = 1e-6
# a solver whose threshold is relative to |f(z)| instead of |z| must not miss by that
ROUNDING = 1e-5
BUDGET = 500


@dataclass(frozen=True, eq=False)
class Collected:
    """A textbook problem as its source states it, float64, with its standard start.

    Attributes:
        kind: ``map`` (``z = function(z)``), ``system`` (``function(z) = 0``, posed as ``z - function(z)``)
            or ``minimiser`` (the least ``function(z)``, posed as ``z - gradient``).
        name: in the collection.
        function: (B, n) -> (B, n), for a minimiser (B, n) -> (B,); row by row.
        start: the published start, n numbers.
        source: the paper and its number, or the library's test.
        solution: a fixed point, root or minimiser that the source names or that has a closed form.
        minimum: the least value that the source names, of a minimiser.
    """

    kind: Kind
    name: str
    function: Callable[[Tensor], Tensor]
    start: Sequence[float]
    source: str
    solution: Sequence[float] | None = None
    minimum: float | None = None

    @property
    def dim(self) -> int:
        """Number of unknowns n."""
        return len(self.start)

    @property
    def z0(self) -> Tensor:
        """The start as a batch of one, (1, n)."""
        return torch.tensor([list(self.start)], dtype=torch.float64)

    def f(self, z: Tensor) -> Tensor:
        """The map whose fixed points are the answers, (B, n) -> (B, n)."""
        if self.kind == "map":
            return self.function(z)
        if self.kind == "system":
            return z - self.function(z)
        with torch.enable_grad():
            point = z.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.function(point).sum(), point)
        return z.detach() - gradient

    def posed(self) -> Any:
        """What :func:`solvers.fixed_point` gets: the map, or the descent of the energy."""
        return solvers.Descent(self.function) if self.kind == "minimiser" else self.f


def residual(problem: Collected, z: Tensor) -> float:
    """``|f(z) - z| / max(1, |z|)`` of z (1, n), computed in float64; infinite where not finite."""
    z = z.detach().double()
    value = float((problem.f(z) - z).norm() / z.norm().clamp_min(1))
    return value if value == value else float("inf")


def solved(problem: Collected, z: Tensor) -> bool:
    """The criterion for every method: ``|f(z) - z| <= 1e-6 max(1, |z|)``, recomputed."""
    return residual(problem, z) <= TOLERANCE * (1 + ROUNDING)


def run(problem: Collected, solver: solvers.Solver | None = None) -> solvers.Solution:
    """Our solver on a problem, with the tolerance and the budget of the comparison."""
    return solvers.fixed_point(
        problem.posed(), problem.z0, solver=solver,
        tolerance=solvers.Tolerance(TOLERANCE, TOLERANCE), max_steps=BUDGET, adjoint=None,
        on_failure="ignore",
    )  # fmt: skip


BARD = (0.14, 0.18, 0.22, 0.25, 0.29, 0.32, 0.35, 0.39, 0.37, 0.58, 0.73, 0.96, 1.34, 2.10, 4.39)
BELL = (0.0009, 0.0044, 0.0175, 0.0540, 0.1295, 0.2420, 0.3521, 0.3989)
KOWALIK_Y = (
    0.1957, 0.1947, 0.1735, 0.1600, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246,
)  # fmt: skip
KOWALIK_U = (4.0, 2.0, 1.0, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625)


def counted(x: Tensor, count: int, first: int = 1) -> Tensor:
    """``first, first + 1, ...``, (count,), in the precision of x."""
    return torch.arange(first, first + count, dtype=x.dtype, device=x.device)


def columns(x: Tensor) -> tuple[Tensor, ...]:
    """The coordinates of x, (B, 1) each, to be combined with (m,)."""
    return x.split(1, dim=1)


def freudenstein_roth(x: Tensor) -> Tensor:
    """MGH 2: ``-13 + x1 + ((5 - x2) x2 - 2) x2``, ``-29 + x1 + ((x2 + 1) x2 - 14) x2``."""
    a, b = columns(x)
    return torch.cat([a - 13 + ((5 - b) * b - 2) * b, a - 29 + ((b + 1) * b - 14) * b], 1)


def brown_badly_scaled(x: Tensor) -> Tensor:
    """MGH 4: ``x1 - 10^6``, ``x2 - 2 10^-6``, ``x1 x2 - 2``."""
    a, b = columns(x)
    return torch.cat([a - 1e6, b - 2e-6, a * b - 2], 1)


def beale(x: Tensor) -> Tensor:
    """MGH 5: ``y_i - x1 (1 - x2^i)``, y = (1.5, 2.25, 2.625)."""
    a, b = columns(x)
    powers = torch.cat([b, b * b, b**3], 1)
    return x.new_tensor([1.5, 2.25, 2.625]) - a * (1 - powers)


def jennrich_sampson(x: Tensor) -> Tensor:
    """MGH 6, m = 10: ``2 + 2 i - exp(i x1) - exp(i x2)``."""
    a, b = columns(x)
    i = counted(x, 10)
    return 2 + 2 * i - torch.exp(i * a) - torch.exp(i * b)


def bard(x: Tensor) -> Tensor:
    """MGH 8: ``y_i - x1 - u / (v x2 + w x3)``, u = i, v = 16 - i, w = min(u, v)."""
    a, b, c = columns(x)
    u = counted(x, 15)
    v = 16 - u
    return x.new_tensor(BARD) - a - u / (v * b + torch.minimum(u, v) * c)


def gaussian(x: Tensor) -> Tensor:
    """MGH 9: ``x1 exp(-x2 (t_i - x3)^2 / 2) - y_i``, t_i = (8 - i) / 2, i = 1 ... 15."""
    a, b, c = columns(x)
    t = (8 - counted(x, 15)) / 2
    return a * torch.exp(-0.5 * b * (t - c) ** 2) - x.new_tensor(BELL + BELL[-2::-1])


def gulf(x: Tensor) -> Tensor:
    """MGH 11, m = 99: ``exp(-|y_i - x2|^x3 / x1) - t_i``.

    ``t_i = i / 100``, ``y_i = 25 + (-50 log t_i)^(2/3)``; the paper prints ``y_i m i x2`` by mistake.
    """
    a, b, c = columns(x)
    t = counted(x, 99) / 100
    y = 25 + (-50 * t.log()) ** (2 / 3)
    return torch.exp(-((y - b).abs() ** c) / a) - t


def box_3d(x: Tensor) -> Tensor:
    """MGH 12, m = 10: ``exp(-t x1) - exp(-t x2) - x3 (exp(-t) - exp(-10 t))``, t = i / 10."""
    a, b, c = columns(x)
    t = counted(x, 10) / 10
    return torch.exp(-t * a) - torch.exp(-t * b) - c * (torch.exp(-t) - torch.exp(-10 * t))


def wood(x: Tensor) -> Tensor:
    """MGH 14: two Rosenbrock valleys and what couples them."""
    a, b, c, d = columns(x)
    first = [10 * (b - a * a), 1 - a, 90**0.5 * (d - c * c), 1 - c]
    return torch.cat([*first, 10**0.5 * (b + d - 2), (b - d) / 10**0.5], 1)


def kowalik_osborne(x: Tensor) -> Tensor:
    """MGH 15: ``y_i - x1 (u^2 + u x2) / (u^2 + u x3 + x4)``."""
    a, b, c, d = columns(x)
    u = x.new_tensor(KOWALIK_U)
    return x.new_tensor(KOWALIK_Y) - a * (u * u + u * b) / (u * u + u * c + d)


def brown_dennis(x: Tensor) -> Tensor:
    """MGH 16, m = 20: ``(x1 + t x2 - e^t)^2 + (x3 + x4 sin t - cos t)^2``, t = i / 5."""
    a, b, c, d = columns(x)
    t = counted(x, 20) / 5
    return (a + t * b - t.exp()) ** 2 + (c + d * t.sin() - t.cos()) ** 2


def biggs_exp6(x: Tensor) -> Tensor:
    """MGH 18, m = 13: ``x3 exp(-t x1) - x4 exp(-t x2) + x6 exp(-t x5) - y``, t = i / 10.

    ``y = exp(-t) - 5 exp(-10 t) + 3 exp(-4 t)``.
    """
    a, b, c, d, e, f = columns(x)
    t = counted(x, 13) / 10
    y = torch.exp(-t) - 5 * torch.exp(-10 * t) + 3 * torch.exp(-4 * t)
    return c * torch.exp(-t * a) - d * torch.exp(-t * b) + f * torch.exp(-t * e) - y


def watson(x: Tensor) -> Tensor:
    """MGH 20: ``p'(t_i) - p(t_i)^2 - 1``, ``p(t) = sum x_j t^(j-1)``, t_i = i / 29; x1; x2 - x1^2 - 1."""
    t = counted(x, 29) / 29
    order = counted(x, x.shape[1], first=0)
    powers = t[:, None] ** order
    value, slope = x @ powers.mT, (x[:, 1:] * order[1:]) @ powers[:, :-1].mT
    edge = torch.stack([x[:, 0], x[:, 1] - x[:, 0] ** 2 - 1], 1)
    return torch.cat([slope - value**2 - 1, edge], 1)


def penalty_1(x: Tensor) -> Tensor:
    """MGH 23: ``sqrt(a) (x_i - 1)``, ``|x|^2 - 1/4``, a = 10^-5."""
    return torch.cat([1e-5**0.5 * (x - 1), (x * x).sum(1, keepdim=True) - 0.25], 1)


def penalty_2(x: Tensor) -> Tensor:
    """MGH 24: ``x1 - 0.2``, ``sqrt(a) (e_i + e_(i-1) - y_i)``, ``sqrt(a) (e_i - exp(-1/10))``, a sum.

    ``e_i = exp(x_i / 10)``, ``y_i = exp(i / 10) + exp((i - 1) / 10)`` for i = 2 ... n, a = 10^-5; the
    sum is ``sum_j (n - j + 1) x_j^2 - 1``.
    """
    n = x.shape[1]
    small = 1e-5**0.5
    e, y = torch.exp(x / 10), torch.exp(counted(x, n) / 10)
    pairs = e[:, 1:] + e[:, :-1] - (y[1:] + y[:-1])
    weight = (counted(x, n).flip(0) * x * x).sum(1, keepdim=True) - 1
    rest = e[:, 1:] - torch.exp(x.new_tensor(-0.1))
    return torch.cat([x[:, :1] - 0.2, small * pairs, small * rest, weight], 1)


def variably_dimensioned(x: Tensor) -> Tensor:
    """MGH 25: ``x_i - 1``, ``s = sum j (x_j - 1)`` and ``s^2``."""
    total = (counted(x, x.shape[1]) * (x - 1)).sum(1, keepdim=True)
    return torch.cat([x - 1, total, total * total], 1)


SCIPY_MAPS = "scipy, optimize/tests/test_minpack.py, TestFixedPoint.{}"
JAXOPT = "jaxopt, tests/anderson_test.py, {}"
OPTIMISTIX = "optimistix, tests/helpers.py, fixed_point_fn_init_args, {}"
ANGLES = tuple(torch.pi / divisor for divisor in (2, 3, 4, 5, 6, 1.27, 1.73))


def weighted_square(z: Tensor, weights: tuple[float, ...]) -> Tensor:
    """``c z^2``; fixed points 0 and ``1 / c``."""
    return z.new_tensor(weights) * z * z


def weighted_root(z: Tensor, weights: tuple[float, ...]) -> Tensor:
    """``c sqrt(z)``; fixed points 0 and ``c^2``; not a number below zero."""
    return z.new_tensor(weights) * z.sqrt()


def logarithmic(z: Tensor) -> Tensor:
    """``log(k_l / (k_s z)) / log(i_0 z / (z - 1)) + 1`` of scipy's issue 5460; ``z = m = 1.3``."""
    ks, kl, m = 2.0, 6.0, 1.3
    i0 = (m - 1) / m * (kl / ks / m) ** (1 / (m - 1))
    return torch.log(kl / ks / z) / torch.log(i0 * z / (z - 1)) + 1


def sine_and_powers(z: Tensor) -> Tensor:
    """``z^2 sin z`` (three coordinates), ``z^3`` (two), ``-z`` (four); z = 0."""
    first, second, third = z.split([3, 2, 4], dim=1)
    return torch.cat([first.sin() * first.square(), second**3, -third], 1)


def rotation(z: Tensor) -> Tensor:
    """Rotations of seven planes by ``ANGLES`` about the centre (1, ..., 14): no contraction."""
    centre = torch.arange(1, 15, dtype=z.dtype)
    x, y = (z - centre).reshape(-1, 7, 2).unbind(2)
    cosine, sine = z.new_tensor(ANGLES).cos(), z.new_tensor(ANGLES).sin()
    turned = torch.stack([cosine * x - sine * y, sine * x + cosine * y], 2)
    return turned.flatten(1) + centre


def _uniform_symmetric() -> tuple[Tensor, Tensor]:
    """A symmetric (200, 200) matrix whose largest eigenvalue is just below 1/2, and an offset."""
    generator = torch.Generator().manual_seed(0)
    raw = 2 * torch.rand(200, 200, generator=generator, dtype=torch.float64) - 1
    matrix = raw + raw.mT
    largest = torch.linalg.eigvalsh(matrix)[-1].abs()
    return matrix / (2 * largest + 1e-4), torch.rand(200, generator=generator, dtype=torch.float64)


MATRIX, OFFSET = _uniform_symmetric()


MIDPOINT = torch.randn(28, 28, generator=torch.Generator().manual_seed(19), dtype=torch.float64)


def _map(
    name: str, function: Callable[[Tensor], Tensor], start: tuple[float, ...],
    solution: tuple[float, ...] | list[float], source: str,
) -> Collected:  # fmt: skip
    return Collected("map", name, function, start, source, solution)


DOTTIE, OMEGA = 0.7390851332151607, float(lambertw(1).real)
SQUARES, ROOTS = (0.75, 1.0, 1.25), (0.75, 1.0, 1.25)
_CENTRE = tuple(float(i) for i in range(1, 15))
_NEAR = tuple(i / 14 for i in range(14))

MAPS: list[Collected] = [
    _map("double", lambda z: 2 * z, (1.0,), (0.0,), SCIPY_MAPS.format("test_scalar_trivial")),
    _map("square", partial(weighted_square, weights=(1.0,)), (1.05,), (1.0,),
        SCIPY_MAPS.format("test_scalar_basic1")),
    _map("root", partial(weighted_root, weights=(1.0,)), (1.05,), (1.0,),
        SCIPY_MAPS.format("test_scalar_basic2")),
    _map("double_2", lambda z: 2 * z, (0.3, 0.15), (0.0, 0.0), SCIPY_MAPS.format("test_array_trivial")),
    _map("square_3", partial(weighted_square, weights=SQUARES), (1.1, 1.15, 0.9),
        tuple(1 / c for c in SQUARES), SCIPY_MAPS.format("test_array_basic1")),
    _map("root_3", partial(weighted_root, weights=ROOTS), (0.8, 1.1, 1.1),
        tuple(c * c for c in ROOTS), SCIPY_MAPS.format("test_array_basic2")),
    _map("lambert", lambda z: torch.exp(-2 * z) / 2, (1.0,), (OMEGA / 2,),
        SCIPY_MAPS.format("test_lambertw")),
    _map("issue_5460", logarithmic, (1.001,), (1.3,), SCIPY_MAPS.format("test_no_acceleration")),
    _map("rational_root",
        lambda z: (z.new_tensor([10.0, 12.0]) / (z + z.new_tensor([3.0, 5.0]))).sqrt(),
        (1.2, 1.3), (1.4920333, 1.37228132),
        "scipy.optimize.fixed_point, the example of its documentation"),
    _map("geometric", lambda z: z.new_tensor([0.9, 0.99, 0.999]) * z, (1.0, 0.4, -0.2), (0.0, 0.0, 0.0),
        JAXOPT.format("test_geometric_decay")),
    _map("halfway", lambda z: 0.5 * z + 0.5, (0.0,), (1.0,), JAXOPT.format("test_support_for_scalars")),
    _map("sine_and_powers", sine_and_powers, (0.6, 0.0, -0.1, 0.7, 0.5, -1 / 3, 0.0, 2 / 3,
        -0.4 / 3), 9 * (0.0,), JAXOPT.format("test_sin_fixed_point")),
    _map("shifted_cosine", lambda z: z.cos() + z.new_tensor([0.0, torch.pi / 2]),
        (0.3, torch.pi / 4), (DOTTIE, torch.pi / 2),
        JAXOPT.format("test_cos_fixed_point")),
    _map("rotation", rotation, _NEAR, _CENTRE, JAXOPT.format("test_rotation_map")),
    _map("affine_200", lambda z: z @ MATRIX.to(z) + OFFSET.to(z), 200 * (0.0,),
        torch.linalg.solve(torch.eye(200, dtype=torch.float64) - MATRIX, OFFSET).tolist(),
        JAXOPT.format("test_affine_contractive_mapping, numbers drawn anew")),
    _map("exponential_28", lambda z: torch.exp(-z), 28 * (0.5,), 28 * (OMEGA,),
        OPTIMISTIX.format("_exponential")),
    _map("midpoint_28", lambda z: z @ MIDPOINT.to(z).mT / 16, 28 * (0.5,), 28 * (0.0,),
        OPTIMISTIX.format("_midpoint_f_linear, numbers drawn anew")),
]  # fmt: skip


MINPACK = MGH + ", as a square system in MINPACK's tests"


def root_example(x: Tensor) -> Tensor:
    """``x_1 + (x_1 - x_2)^3 / 2 - 1``, ``(x_2 - x_1)^3 / 2 + x_2``."""
    difference = x[:, 0] - x[:, 1]
    half = 0.5 * difference**3
    return torch.stack([x[:, 0] + half - 1, x[:, 1] - half], 1)


def fsolve_example(x: Tensor) -> Tensor:
    """``x_1 cos x_2 - 4``, ``x_1 x_2 - x_2 - 5``."""
    return torch.stack([x[:, 0] * x[:, 1].cos() - 4, x[:, 0] * x[:, 1] - x[:, 1] - 5], 1)


def variably_dimensioned_system(x: Tensor) -> Tensor:
    """``x_k - 1 + k s (1 + 2 s^2)``, ``s = sum_j j (x_j - 1)``: half the gradient of MGH 25."""
    k = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)
    total = (k * (x - 1)).sum(1, keepdim=True)
    return x - 1 + k * total * (1 + 2 * total * total)


_system = partial(Collected, "system")


SYSTEMS: list[Collected] = [
    _system("F", lambda x: -cubic(x), 5 * [1.0], SCIPY.format("F"), 5 * [0.0]),
    _system("F2", identity, [1.0, 2, 3, 4, 5, 6], SCIPY.format("F2"), 6 * [0.0]),
    _system("F3", tridiagonal, [1.0, 2, 3], SCIPY.format("F3"), [-2.5, -4.0, -3.5]),
    _system("F4_powell", powell_badly_scaled, [-1.0, -2.0], SCIPY.format("F4_powell"),
        [1.0981593296999225e-05, 9.106146739866525]),
    _system("F5", pressure_network, [2.0, 0, 2, 0], SCIPY.format("F5"), 4 * [1.0]),
    _system("F6", scipy_f6, [-0.5, 1.4], SCIPY.format("F6")),
    _system("root_example", root_example, [0.0, 0.0],
        "scipy.optimize.root, the example of its documentation", [0.8411639019140096,
        0.1588360980859904]),
    _system("fsolve_example", fsolve_example, [1.0, 1.0],
        "scipy.optimize.fsolve, the example of its documentation", [6.50409711, 0.90841421]),
    _system("rosenbrock", rosenbrock, [-1.2, 1.0], MGH.format(1), [1.0, 1.0]),
    _system("helical_valley", helical_valley, [-1.0, 0, 0], MGH.format(7), [1.0, 0.0, 0.0]),
    _system("powell_singular", powell_singular, [3.0, -1, 0, 1], MGH.format(13), 4 * [0.0]),
    _system("variably_dimensioned_10", variably_dimensioned_system, [1 - k / 10 for k in range(1, 11)],
        MINPACK.format(25), 10 * [1.0]),
    _system("trigonometric_10", trigonometric, 10 * [0.1], MGH.format(26), 10 * [0.0]),
    _system("brown_almost_linear_10", brown_almost_linear, 10 * [0.5], MGH.format(27),
        10 * [1.0]),
    _system("boundary_value_10", discrete_boundary_value, parabola(10), MGH.format(28)),
    _system("discrete_integral_10", discrete_integral, parabola(10), MGH.format(29)),
    _system("broyden_tridiagonal_10", broyden_tridiagonal, 10 * [-1.0], MGH.format(30)),
    _system("broyden_banded_10", broyden_banded, 10 * [-1.0], MGH.format(31)),
    _system("chebyquad_5", chebyquad, even(5), MGH.format(35)),
    _system("chebyquad_7", chebyquad, even(7), MGH.format(35)),
]  # fmt: skip


OPTIMISTIX_MINIMISER = "optimistix, tests/helpers.py, minimisation_fn_minima_init_args, {}"
JAXOPT_MINIMISER = "jaxopt, tests/bfgs_test.py, {}"


def sum_of_squares(system: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``sum f_i(x)^2``, (B, n) -> (B,)."""

    def energy(x: Tensor) -> Tensor:
        return system(x).square().sum(1)

    return energy


def rosenbrock_chain(x: Tensor) -> Tensor:
    """``sum 100 (x_(i+1) - x_i^2)^2 + (1 - x_i)^2``."""
    return (100 * (x[:, 1:] - x[:, :-1] ** 2) ** 2 + (1 - x[:, :-1]) ** 2).sum(1)


FEATURES = ((1.0, 1.0, 1.0), (1.0, 1.0, 0.0), (1.0, 0.0, 1.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0))


def maximum_entropy(x: Tensor) -> Tensor:
    """``log sum_w exp(f_w . x) - k . x``: translating "in" with constraints on five words."""
    logits = x @ x.new_tensor(FEATURES).mT
    return logits.logsumexp(1) - x @ x.new_tensor([1.0, 0.3, 0.5])


def eggholder(x: Tensor) -> Tensor:
    """``-(x2 + 47) sin sqrt|x1/2 + x2 + 47| - x1 sin sqrt|x1 - x2 - 47|``."""
    a, b = x[:, 0], x[:, 1] + 47
    return -b * (a / 2 + b).abs().sqrt().sin() - a * (a - b).abs().sqrt().sin()


def zakharov(x: Tensor) -> Tensor:
    """``|x|^2 + s^2 + s^4``, ``s = sum i x_i / 2``."""
    half = 0.5 * counted(x, x.shape[1])
    total = (half * x).sum(1)
    return (x * x).sum(1) + total**2 + total**4


def _bowl() -> Tensor:
    generator = torch.Generator().manual_seed(17)
    raw = torch.randn(20, 20, generator=generator, dtype=torch.float64)
    return raw.mT @ raw


BOWL = _bowl()


_minimiser = partial(Collected, "minimiser")


def _squares(
    name: str, system: Callable[[Tensor], Tensor], start: Sequence[float], number: int,
    solution: Sequence[float] | None = None, minimum: float | None = None,
) -> Collected:  # fmt: skip
    energy = sum_of_squares(system)
    return _minimiser(name, energy, start, MGH.format(number), solution, minimum)


MINIMISERS: list[Collected] = [
    _squares("rosenbrock", rosenbrock, [-1.2, 1.0], 1, [1.0, 1.0], 0.0),
    _squares("freudenstein_roth", freudenstein_roth, [0.5, -2.0], 2, [5.0, 4.0], 0.0),
    _squares("powell_badly_scaled", powell_badly_scaled, [0.0, 1.0], 3,
        [1.0981593296999225e-05, 9.106146739866525], 0.0),
    _squares("brown_badly_scaled", brown_badly_scaled, [1.0, 1.0], 4, [1e6, 2e-6], 0.0),
    _squares("beale", beale, [1.0, 1.0], 5, [3.0, 0.5], 0.0),
    _squares("jennrich_sampson", jennrich_sampson, [0.3, 0.4], 6, None, 124.362),
    _squares("helical_valley", helical_valley, [-1.0, 0, 0], 7, [1.0, 0.0, 0.0], 0.0),
    _squares("bard", bard, [1.0, 1.0, 1.0], 8, None, 8.21487e-3),
    _squares("gaussian", gaussian, [0.4, 1.0, 0.0], 9, None, 1.12793e-8),
    _squares("gulf", gulf, [5.0, 2.5, 0.15], 11, [50.0, 25.0, 1.5], 0.0),
    _squares("box_3d", box_3d, [0.0, 10.0, 20.0], 12, [1.0, 10.0, 1.0], 0.0),
    _squares("powell_singular", powell_singular, [3.0, -1, 0, 1], 13, 4 * [0.0], 0.0),
    _squares("wood", wood, [-3.0, -1.0, -3.0, -1.0], 14, 4 * [1.0], 0.0),
    _squares("kowalik_osborne", kowalik_osborne, [0.25, 0.39, 0.415, 0.39], 15, None,
        3.07505e-4),
    _squares("brown_dennis", brown_dennis, [25.0, 5.0, -5.0, -1.0], 16, None, 85822.2),
    _squares("biggs_exp6", biggs_exp6, [1.0, 2, 1, 1, 1, 1], 18, [1.0, 10, 1, 5, 4, 3],
        0.0),
    _squares("watson_6", watson, 6 * [0.0], 20, None, 2.28767e-3),
    _squares("penalty_1_4", penalty_1, [1.0, 2.0, 3.0, 4.0], 23, None, 2.24997e-5),
    _squares("penalty_2_4", penalty_2, 4 * [0.5], 24, None, 9.37629e-6),
    _squares("variably_dimensioned_10", variably_dimensioned,
        [1 - k / 10 for k in range(1, 11)], 25, 10 * [1.0], 0.0),
    _squares("trigonometric_10", trigonometric, 10 * [0.1], 26, 10 * [0.0], 0.0),
    _squares("broyden_tridiagonal_10", broyden_tridiagonal, 10 * [-1.0], 30, None, 0.0),
    _squares("broyden_banded_10", broyden_banded, 10 * [-1.0], 31, None, 0.0),
    _squares("chebyquad_8", chebyquad, even(8), 35, None, 3.51687e-3),
    _minimiser("rosenbrock_5", rosenbrock_chain, [1.3, 0.7, 0.8, 1.9, 1.2],
        "scipy.optimize.minimize, the example of its documentation", 5 * [1.0], 0.0),
    _minimiser("maximum_entropy", maximum_entropy, [0.0, 0.0, 0.0],
        "scipy, optimize/tests/test_optimize.py, CheckOptimize", [0.0, -0.524869316, 0.487525860]),
    _minimiser("rosenbrock_0", rosenbrock_chain, [0.0, 0.0], JAXOPT_MINIMISER.format("test_correctness"),
        [1.0, 1.0], 0.0),
    _minimiser("eggholder", eggholder, [100.0, 100.0],
        JAXOPT_MINIMISER.format("test_against_scipy, eggholder")),
    _minimiser("zakharov_6", zakharov, [600.0, 700.0, 200.0, 100.0, 90.0, 1e4],
        JAXOPT_MINIMISER.format("test_zakharov"), 6 * [0.0], 0.0),
    _minimiser("himmelblau",
        lambda x: (x[:, 0] ** 2 + x[:, 1] - 11) ** 2 + (x[:, 0] + x[:, 1] ** 2 - 7) ** 2,
        [2.0, 2.5], OPTIMISTIX_MINIMISER.format("himmelblau"), [3.0, 2.0], 0.0),
    _minimiser("matyas", lambda x: 0.26 * (x * x).sum(1) - 0.48 * x[:, 0] * x[:, 1], [6.0, 6.0],
        OPTIMISTIX_MINIMISER.format("matyas"), [0.0, 0.0], 0.0),
    _minimiser("bowl_20", lambda x: (x * (x @ BOWL.to(x))).sum(1), 20 * [0.05],
        OPTIMISTIX_MINIMISER.format("bowl, numbers drawn anew"), 20 * [0.0], 0.0),
    _minimiser("beale_2_0", sum_of_squares(beale), [2.0, 0.0], OPTIMISTIX_MINIMISER.format("beale"),
        [3.0, 0.5], 0.0),
]  # fmt: skip

"""Nonlinear systems of scipy's tests and of Moré, Garbow and Hillstrom, for the zoo; 70 collected problems.

Each system takes x (B, n) to F(x) (B, n), row by row; each ``*_potential`` takes it to a function (B,) of
which F is the gradient. scipy: optimize/tests/test_nonlin.py. MGH: J. Moré, B. Garbow, K. Hillstrom,
"Testing unconstrained optimization software", ACM Trans. Math. Softw. 7 (1981) 17. The 70 problems are
stated as in their sources, neither rescaled nor reordered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from scipy.special import lambertw
from torch import Generator, Tensor
from torch.nn.functional import pad

import solvers
from problems import Build, ZooProblem, newton, normal

SCIPY = "scipy, optimize/tests/test_nonlin.py, problem {}"
MGH = "J. Moré, B. Garbow, K. Hillstrom, ACM Trans. Math. Softw. 7 (1981) 17, problem {}"
F64 = torch.float64
Function = Callable[[Tensor], Tensor]


def of(terms: Callable[..., Tensor | list[Tensor]]) -> Function:
    """The function of x (B, n) whose values are ``terms(x_1, ..., x_n)``, of coordinates (B, 1)."""

    def function(x: Tensor) -> Tensor:
        found = terms(*x.split(1, dim=1))
        return torch.cat(found, 1) if isinstance(found, list) else found

    return function


def counted(x: Tensor, count: int, first: int = 1) -> Tensor:
    """``first, first + 1, ...``, (count,), in the precision of x."""
    return torch.arange(first, first + count, dtype=x.dtype, device=x.device)


def grid(x: Tensor) -> tuple[float, Tensor]:
    """Spacing ``h = 1 / (n + 1)`` and the points ``t_i = i h``."""
    h = 1.0 / (x.shape[1] + 1)
    return h, h * counted(x, x.shape[1])


def shift_down(x: Tensor) -> Tensor:
    """``x_{i-1}``, zero at the edge."""
    return pad(x[:, :-1], (1, 0))


def shift_up(x: Tensor) -> Tensor:
    """``x_{i+1}``, zero at the edge."""
    return pad(x[:, 1:], (0, 1))


def cubic(x: Tensor) -> Tensor:
    """scipy F with the sign turned: ``d x + 0.01 |x|^2 x``, d = (3, 2, 1.5, 1, 0.5)."""
    return x.new_tensor([3.0, 2.0, 1.5, 1.0, 0.5]) * x + 0.01 * (x * x).sum(1, keepdim=True) * x


def cubic_potential(x: Tensor) -> Tensor:
    square = (x * x).sum(1)
    own = 0.5 * (x.new_tensor([3.0, 2.0, 1.5, 1.0, 0.5]) * x * x).sum(1)
    return own + 0.0025 * square * square


def tridiagonal(x: Tensor) -> Tensor:
    """scipy F3: ``A x - b``, A = tridiag(1, -2, 1), b = (1, 2, 3)."""
    return shift_down(x) - 2 * x + shift_up(x) - counted(x, 3)


def pressure_network(x: Tensor) -> Tensor:
    """Drops ``k x_i^2`` of four parallel pipes (k = 1/2) less the first one's; a total flow of 4."""
    drop = 0.5 * x * x
    return torch.cat([drop[:, 1:] - drop[:, :1], x.sum(1, keepdim=True) - 4], 1)


def scipy_f6(x: Tensor) -> Tensor:
    """scipy F6: ``-J0^-1 ((x1+3)(x2^5-7) + 18, sin(x2 exp(x1) - 1))``."""
    first = (x[:, 0] + 3) * (x[:, 1] ** 5 - 7) + 18
    second = torch.sin(x[:, 1] * torch.exp(x[:, 0]) - 1)
    a, b, c, d = -4.256, 14.7, 0.8394989, 0.59964207
    return -torch.stack([d * first - b * second, a * second - c * first], 1) / (a * d - b * c)


def helical_valley(x: Tensor) -> Tensor:
    """MGH 7: ``10 (x_3 - 10 theta)``, ``10 (r - 1)``, ``x_3``; theta in turns, from -1/4 to 3/4.

    The paper's angle, atan(x2 / x1) with 1/2 added for negative x1, is cut along x1 = 0, x2 < 0.
    """
    radius = x[:, :2].norm(dim=1)
    turns = torch.atan2(x[:, 1], x[:, 0]) / (2 * torch.pi)
    turns = torch.where(turns < -0.25, turns + 1, turns)
    return torch.stack([10 * (x[:, 2] - 10 * turns), 10 * (radius - 1), x[:, 2]], 1)


def trigonometric(x: Tensor) -> Tensor:
    """MGH 26: ``n - sum cos x_j + i (1 - cos x_i) - sin x_i``."""
    i, cosine = counted(x, x.shape[1]), x.cos()
    return x.shape[1] - cosine.sum(1, keepdim=True) + i * (1 - cosine) - x.sin()


def brown_almost_linear(x: Tensor) -> Tensor:
    """MGH 27: ``x_i + sum x_j - (n + 1)`` for i < n, ``prod x_j - 1``."""
    linear = x + x.sum(1, keepdim=True) - (x.shape[1] + 1)
    return torch.cat([linear[:, :-1], x.prod(1, keepdim=True) - 1], 1)


def discrete_boundary_value(x: Tensor) -> Tensor:
    """MGH 28: ``2 x_i - x_{i-1} - x_{i+1} + h^2 (x_i + t_i + 1)^3 / 2``."""
    h, t = grid(x)
    return 2 * x - shift_down(x) - shift_up(x) + h * h * (x + t + 1) ** 3 / 2


def boundary_value_potential(x: Tensor) -> Tensor:
    h, t = grid(x)
    stiffness = 0.5 * (x * (2 * x - shift_down(x) - shift_up(x))).sum(1)
    return stiffness + (h * h * (x + t + 1) ** 4 / 8).sum(1)


def discrete_integral(x: Tensor) -> Tensor:
    """MGH 29: the same boundary value problem through its Green's function."""
    h, t = grid(x)
    cube = (x + t + 1) ** 3
    above = ((1 - t) * cube).flip(1).cumsum(1).flip(1) - (1 - t) * cube
    return x + h / 2 * ((1 - t) * (t * cube).cumsum(1) + t * above)


def broyden_tridiagonal(x: Tensor) -> Tensor:
    """MGH 30: ``(3 - 2 x_i) x_i - x_{i-1} - 2 x_{i+1} + 1``."""
    return (3 - 2 * x) * x - shift_down(x) - 2 * shift_up(x) + 1


def broyden_banded(x: Tensor) -> Tensor:
    """MGH 31: ``x_i (2 + 5 x_i^2) + 1 - sum_j x_j (1 + x_j)``, j from i-5 to i+1 without i."""
    term = x * (1 + x)
    return x * (2 + 5 * x * x) + 1 - (pad(term, (5, 1)).unfold(1, 7, 1).sum(2) - term)


def chebyquad(x: Tensor) -> Tensor:
    """MGH 35: mean of the i-th Chebyshev polynomial of [0, 1] over the x_j less its integral."""
    y = 2 * x - 1
    previous, current = torch.ones_like(y), y
    equations = []
    for i in range(1, x.shape[1] + 1):
        equations.append(current.mean(1) + (0.0 if i % 2 else 1.0 / (i * i - 1)))
        previous, current = current, 2 * y * current - previous
    return torch.stack(equations, 1)


# MGH 1: ``10 (x_2 - x_1^2)``, ``1 - x_1``; MGH 13, whose Jacobian has rank two at the root 0.
rosenbrock = of(lambda a, b: [10 * (b - a**2), 1 - a])
powell_singular = of(
    lambda a, b, c, d: [a + 10 * b, 5**0.5 * (c - d), (b - 2 * c) ** 2, 10**0.5 * (a - d) ** 2]
)
# scipy F4 and MGH 3.
powell_badly_scaled = of(lambda a, b: [1e4 * a * b - 1, torch.exp(-a) + torch.exp(-b) - 1.0001])


def even(n: int) -> list[float]:
    """``i / (n + 1)``."""
    return [i / (n + 1) for i in range(1, n + 1)]


def parabola(n: int) -> list[float]:
    """``t_i (t_i - 1)``."""
    return [t * (t - 1) for t in even(n)]


def reordered(system: Function, *order: int) -> Function:
    """The equations of a system in another order, counted from 1; less than 0: with the sign turned."""

    def moved(x: Tensor) -> Tensor:
        equations = system(x).unbind(1)
        return torch.stack([math.copysign(1, n) * equations[abs(n) - 1] for n in order], 1)

    return moved


BATCH = 4


def posed(
    source: str, system: Function, start: Sequence[float], factor: float, *, origin: float = 0.0,
    potential: Function | None = None, root: Literal["zero", "one", "several"] = "one",
) -> Build:  # fmt: skip
    """``f(z, origin) = z - factor F(z - origin)``, with ``factor V(z - origin)`` for V' = F.

    ``root``: 0 exactly, the only one in reach, or one of several.
    """

    def f(z: Tensor, origin: Tensor) -> Tensor:
        return z - factor * system(z - origin)

    def energy(z: Tensor, origin: Tensor) -> Tensor:
        assert potential is not None
        return factor * potential(z - origin)

    def build(generator: Generator) -> ZooProblem:
        first = torch.tensor(start, dtype=F64)
        noise = normal(generator, BATCH, len(start))
        noise[0] = 0
        moved = torch.full_like(noise, origin)
        z0 = moved + first + 0.1 * first.abs().max() * noise

        def reference() -> Tensor:
            return moved.clone() if root == "zero" else newton(f, z0, (moved,))

        return ZooProblem(
            f=f, z0=z0, args=(moved,), symmetric=potential is not None, source=source,
            reference=None if root == "several" else reference,
            energy=None if potential is None else energy,
        )  # fmt: skip

    return build


BUILDS: dict[str, Build] = {
    "scipy_F_cubic": posed(SCIPY.format("F"), cubic, 5 * [1.0], 0.4,
        potential=cubic_potential, origin=1.0, root="zero"),
    "scipy_F2_identity": posed(SCIPY.format("F2"), lambda x: x, [1, 2, 3, 4, 5, 6], 0.5,
        potential=lambda x: 0.5 * (x * x).sum(1), origin=1.0, root="zero"),
    "scipy_F3_tridiagonal": posed(SCIPY.format("F3"), tridiagonal, [1, 2, 3], -0.5,
        potential=lambda x: 0.5 * (x * (tridiagonal(x) - counted(x, 3))).sum(1)),
    "scipy_F5_pressure_network": posed(SCIPY.format("F5"), reordered(pressure_network, 4, 1, 2, 3),
        [2.0, 0, 2, 0], 0.25, root="several"),
    "scipy_F6": posed(SCIPY.format("F6"), scipy_f6, [-0.5, 1.4], -0.8, root="several"),
    "mgh_rosenbrock": posed(MGH.format(1), reordered(rosenbrock, -2, 1), [-1.2, 1.0], 0.1),
    "mgh_trigonometric": posed(MGH.format(26), trigonometric, 10 * [0.1], -1.0,
        origin=1.0, root="several"),
    "mgh_brown_almost_linear": posed(MGH.format(27), brown_almost_linear, 10 * [0.5],
        0.15, root="several"),
    "mgh_discrete_boundary_value": posed(MGH.format(28), discrete_boundary_value,
        parabola(10), 0.4, potential=boundary_value_potential),
    "mgh_discrete_integral": posed(MGH.format(29), discrete_integral, parabola(10), 1.0),
    "mgh_broyden_tridiagonal": posed(MGH.format(30), broyden_tridiagonal, 10 * [-1.0],
        0.15, root="several"),
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
    """

    kind: Kind
    name: str
    function: Function
    start: Sequence[float]
    source: str
    solution: Sequence[float] | None = None

    @property
    def z0(self) -> Tensor:
        """The start as a batch of one, (1, n)."""
        return torch.tensor([list(self.start)], dtype=F64)

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
    descends = problem.kind == "minimiser"
    return solvers.fixed_point(
        solvers.Descent(problem.function) if descends else problem.f, problem.z0, solver=solver,
        tolerance=solvers.Tolerance(TOLERANCE, TOLERANCE), max_steps=BUDGET, adjoint=None,
        on_failure="ignore",
    )  # fmt: skip


SCIPY_MAPS = "scipy, optimize/tests/test_minpack.py, TestFixedPoint.{}"
JAXOPT = "jaxopt, tests/anderson_test.py, {}"
OPTIMISTIX = "optimistix, tests/helpers.py, fixed_point_fn_init_args, {}"


def logarithmic(z: Tensor) -> Tensor:
    """``log(k_l / (k_s z)) / log(i_0 z / (z - 1)) + 1`` of scipy's issue 5460; ``z = m = 1.3``."""
    ks, kl, m = 2.0, 6.0, 1.3
    i0 = (m - 1) / m * (kl / ks / m) ** (1 / (m - 1))
    return torch.log(kl / ks / z) / torch.log(i0 * z / (z - 1)) + 1


def sine_and_powers(z: Tensor) -> Tensor:
    """``z^2 sin z`` (three coordinates), ``z^3`` (two), ``-z`` (four); z = 0."""
    first, second, third = z.split([3, 2, 4], dim=1)
    return torch.cat([first.sin() * first.square(), second**3, -third], 1)


ANGLES = torch.pi / torch.tensor([2, 3, 4, 5, 6, 1.27, 1.73], dtype=F64)
CENTRE = torch.arange(1, 15, dtype=F64)


def rotation(z: Tensor) -> Tensor:
    """Rotations of seven planes by ``ANGLES`` about ``CENTRE``: no contraction."""
    x, y = (z - CENTRE).reshape(-1, 7, 2).unbind(2)
    cosine, sine = ANGLES.cos(), ANGLES.sin()
    return torch.stack([cosine * x - sine * y, sine * x + cosine * y], 2).flatten(1) + CENTRE


def _uniform_symmetric() -> tuple[Tensor, Tensor]:
    """A symmetric (200, 200) matrix whose largest eigenvalue is just below 1/2, and an offset."""
    generator = torch.Generator().manual_seed(0)
    raw = 2 * torch.rand(200, 200, generator=generator, dtype=F64) - 1
    matrix = raw + raw.mT
    largest = torch.linalg.eigvalsh(matrix)[-1].abs()
    return matrix / (2 * largest + 1e-4), torch.rand(200, generator=generator, dtype=F64)


def drawn(seed: int, *shape: int) -> Tensor:
    return normal(torch.Generator().manual_seed(seed), *shape)


MATRIX, OFFSET = _uniform_symmetric()
MIDPOINT = drawn(19, 28, 28)
DOTTIE, OMEGA = 0.7390851332151607, float(lambertw(1).real)
WEIGHTS = torch.tensor([0.75, 1.0, 1.25], dtype=F64)


def _map(
    name: str, function: Function, start: Sequence[float], solution: Sequence[float], source: str
) -> Collected:
    return Collected("map", name, function, start, source, solution)


MAPS: list[Collected] = [
    _map("double", lambda z: 2 * z, [1.0], [0.0], SCIPY_MAPS.format("test_scalar_trivial")),
    _map("square", lambda z: z * z, [1.05], [1.0], SCIPY_MAPS.format("test_scalar_basic1")),
    _map("root", torch.sqrt, [1.05], [1.0], SCIPY_MAPS.format("test_scalar_basic2")),
    _map("double_2", lambda z: 2 * z, [0.3, 0.15], [0.0, 0.0], SCIPY_MAPS.format("test_array_trivial")),
    _map("square_3", lambda z: WEIGHTS * z * z, [1.1, 1.15, 0.9], (1 / WEIGHTS).tolist(),
        SCIPY_MAPS.format("test_array_basic1")),
    _map("root_3", lambda z: WEIGHTS * z.sqrt(), [0.8, 1.1, 1.1], WEIGHTS.square().tolist(),
        SCIPY_MAPS.format("test_array_basic2")),
    _map("lambert", lambda z: torch.exp(-2 * z) / 2, [1.0], [OMEGA / 2], SCIPY_MAPS.format("test_lambertw")),
    _map("issue_5460", logarithmic, [1.001], [1.3], SCIPY_MAPS.format("test_no_acceleration")),
    _map("rational_root", of(lambda a, b: [(10 / (a + 3)).sqrt(), (12 / (b + 5)).sqrt()]),
        [1.2, 1.3], [1.4920333, 1.37228132], "scipy.optimize.fixed_point, the example of its documentation"),
    _map("geometric", of(lambda a, b, c: [0.9 * a, 0.99 * b, 0.999 * c]), [1.0, 0.4, -0.2], 3 * [0.0],
        JAXOPT.format("test_geometric_decay")),
    _map("halfway", lambda z: 0.5 * z + 0.5, [0.0], [1.0], JAXOPT.format("test_support_for_scalars")),
    _map("sine_and_powers", sine_and_powers, [0.6, 0.0, -0.1, 0.7, 0.5, -1 / 3, 0.0, 2 / 3, -0.4 / 3],
        9 * [0.0], JAXOPT.format("test_sin_fixed_point")),
    _map("shifted_cosine", of(lambda a, b: [a.cos(), b.cos() + torch.pi / 2]), [0.3, torch.pi / 4],
        [DOTTIE, torch.pi / 2], JAXOPT.format("test_cos_fixed_point")),
    _map("rotation", rotation, [i / 14 for i in range(14)], CENTRE.tolist(),
        JAXOPT.format("test_rotation_map")),
    _map("affine_200", lambda z: z @ MATRIX + OFFSET, 200 * [0.0],
        torch.linalg.solve(torch.eye(200, dtype=F64) - MATRIX, OFFSET).tolist(),
        JAXOPT.format("test_affine_contractive_mapping, numbers drawn anew")),
    _map("exponential_28", lambda z: torch.exp(-z), 28 * [0.5], 28 * [OMEGA],
        OPTIMISTIX.format("_exponential")),
    _map("midpoint_28", lambda z: z @ MIDPOINT.mT / 16, 28 * [0.5], 28 * [0.0],
        OPTIMISTIX.format("_midpoint_f_linear, numbers drawn anew")),
]  # fmt: skip


def variably_dimensioned_system(x: Tensor) -> Tensor:
    """``x_k - 1 + k s (1 + 2 s^2)``, ``s = sum_j j (x_j - 1)``: half the gradient of MGH 25."""
    k = counted(x, x.shape[1])
    total = (k * (x - 1)).sum(1, keepdim=True)
    return x - 1 + k * total * (1 + 2 * total * total)


_system = partial(Collected, "system")
NEARLY_ONE = [1 - k / 10 for k in range(1, 11)]
BADLY_SCALED = [1.0981593296999225e-05, 9.106146739866525]

SYSTEMS: list[Collected] = [
    _system("F", lambda x: -cubic(x), 5 * [1.0], SCIPY.format("F"), 5 * [0.0]),
    _system("F2", lambda x: x, [1.0, 2, 3, 4, 5, 6], SCIPY.format("F2"), 6 * [0.0]),
    _system("F3", tridiagonal, [1.0, 2, 3], SCIPY.format("F3"), [-2.5, -4.0, -3.5]),
    _system("F4_powell", powell_badly_scaled, [-1.0, -2.0], SCIPY.format("F4_powell"), BADLY_SCALED),
    _system("F5", pressure_network, [2.0, 0, 2, 0], SCIPY.format("F5"), 4 * [1.0]),
    _system("F6", scipy_f6, [-0.5, 1.4], SCIPY.format("F6")),
    _system("root_example", of(lambda a, b: [a + 0.5 * (a - b) ** 3 - 1, b - 0.5 * (a - b) ** 3]),
        [0.0, 0.0], "scipy.optimize.root, the example of its documentation",
        [0.8411639019140096, 0.1588360980859904]),
    _system("fsolve_example", of(lambda a, b: [a * b.cos() - 4, a * b - b - 5]), [1.0, 1.0],
        "scipy.optimize.fsolve, the example of its documentation", [6.50409711, 0.90841421]),
    _system("rosenbrock", rosenbrock, [-1.2, 1.0], MGH.format(1), [1.0, 1.0]),
    _system("helical_valley", helical_valley, [-1.0, 0, 0], MGH.format(7), [1.0, 0.0, 0.0]),
    _system("powell_singular", powell_singular, [3.0, -1, 0, 1], MGH.format(13), 4 * [0.0]),
    _system("variably_dimensioned_10", variably_dimensioned_system, NEARLY_ONE,
        (MGH + ", as a square system in MINPACK's tests").format(25), 10 * [1.0]),
    _system("trigonometric_10", trigonometric, 10 * [0.1], MGH.format(26), 10 * [0.0]),
    _system("brown_almost_linear_10", brown_almost_linear, 10 * [0.5], MGH.format(27), 10 * [1.0]),
    _system("boundary_value_10", discrete_boundary_value, parabola(10), MGH.format(28)),
    _system("discrete_integral_10", discrete_integral, parabola(10), MGH.format(29)),
    _system("broyden_tridiagonal_10", broyden_tridiagonal, 10 * [-1.0], MGH.format(30)),
    _system("broyden_banded_10", broyden_banded, 10 * [-1.0], MGH.format(31)),
    _system("chebyquad_5", chebyquad, even(5), MGH.format(35)),
    _system("chebyquad_7", chebyquad, even(7), MGH.format(35)),
]  # fmt: skip


def numbers(count: int) -> Tensor:
    """``1, 2, ..., count``."""
    return torch.arange(1, count + 1, dtype=F64)


def data(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


# The tables of MGH 8, 9 and 15, and the abscissas of their problems.
BARD = data(
    0.14, 0.18, 0.22, 0.25, 0.29, 0.32, 0.35, 0.39, 0.37, 0.58, 0.73, 0.96, 1.34, 2.10, 4.39
)
HALF_BELL = data(0.0009, 0.0044, 0.0175, 0.0540, 0.1295, 0.2420, 0.3521, 0.3989)
BELL = torch.cat([HALF_BELL, HALF_BELL[:-1].flip(0)])
KOWALIK = data(
    0.1957, 0.1947, 0.1735, 0.1600, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246
)
U = data(4.0, 2.0, 1.0, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625)
I10, I15, T10, T13, T20 = (
    numbers(10),
    numbers(15),
    numbers(10) / 10,
    numbers(13) / 10,
    numbers(20) / 5,
)
BIGGS = torch.exp(-T13) - 5 * torch.exp(-10 * T13) + 3 * torch.exp(-4 * T13)
# MGH 11: the paper prints ``y_i m i x2`` by mistake.
T99 = numbers(99) / 100
GULF = 25 + (-50 * T99.log()) ** (2 / 3)


def watson(x: Tensor) -> Tensor:
    """MGH 20: ``p'(t_i) - p(t_i)^2 - 1``, ``p(t) = sum x_j t^(j-1)``, t_i = i / 29; x1; x2 - x1^2 - 1."""
    order = counted(x, x.shape[1], first=0)
    powers = (numbers(29) / 29)[:, None] ** order
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
    i, small, e = counted(x, x.shape[1]), 1e-5**0.5, torch.exp(x / 10)
    y = torch.exp(i / 10)
    pairs = e[:, 1:] + e[:, :-1] - (y[1:] + y[:-1])
    weight = (i.flip(0) * x * x).sum(1, keepdim=True) - 1
    return torch.cat(
        [x[:, :1] - 0.2, small * pairs, small * (e[:, 1:] - math.exp(-0.1)), weight], 1
    )


def variably_dimensioned(x: Tensor) -> Tensor:
    """MGH 25: ``x_i - 1``, ``s = sum j (x_j - 1)`` and ``s^2``."""
    total = (counted(x, x.shape[1]) * (x - 1)).sum(1, keepdim=True)
    return torch.cat([x - 1, total, total * total], 1)


OPTIMISTIX_MINIMISER = "optimistix, tests/helpers.py, minimisation_fn_minima_init_args, {}"
JAXOPT_MINIMISER = "jaxopt, tests/bfgs_test.py, {}"


def sum_of_squares(system: Function) -> Function:
    """``sum f_i(x)^2``, (B, n) -> (B,)."""
    return lambda x: system(x).square().sum(1)


def rosenbrock_chain(x: Tensor) -> Tensor:
    """``sum 100 (x_(i+1) - x_i^2)^2 + (1 - x_i)^2``."""
    return (100 * (x[:, 1:] - x[:, :-1] ** 2) ** 2 + (1 - x[:, :-1]) ** 2).sum(1)


FEATURES = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 0, 0], [1, 0, 0]], dtype=F64)


def maximum_entropy(x: Tensor) -> Tensor:
    """``log sum_w exp(f_w . x) - k . x``: translating "in" with constraints on five words."""
    return (x @ FEATURES.mT).logsumexp(1) - x @ data(1.0, 0.3, 0.5)


def eggholder(x: Tensor) -> Tensor:
    """``-(x2 + 47) sin sqrt|x1/2 + x2 + 47| - x1 sin sqrt|x1 - x2 - 47|``."""
    a, b = x[:, 0], x[:, 1] + 47
    return -b * (a / 2 + b).abs().sqrt().sin() - a * (a - b).abs().sqrt().sin()


def zakharov(x: Tensor) -> Tensor:
    """``|x|^2 + s^2 + s^4``, ``s = sum i x_i / 2``."""
    total = (0.5 * counted(x, x.shape[1]) * x).sum(1)
    return (x * x).sum(1) + total**2 + total**4


RAW = drawn(17, 20, 20)
BOWL = RAW.mT @ RAW
_minimiser = partial(Collected, "minimiser")
beale = of(lambda a, b: data(1.5, 2.25, 2.625) - a * (1 - torch.cat([b, b * b, b**3], 1)))


def _squares(
    number: int, name: str, system: Function, start: Sequence[float],
    solution: Sequence[float] | None = None,
) -> Collected:  # fmt: skip
    return _minimiser(name, sum_of_squares(system), start, MGH.format(number), solution)


MINIMISERS: list[Collected] = [
    _squares(1, "rosenbrock", rosenbrock, [-1.2, 1.0], [1.0, 1.0]),
    _squares(2, "freudenstein_roth", of(lambda a, b: [
        a - 13 + ((5 - b) * b - 2) * b, a - 29 + ((b + 1) * b - 14) * b]), [0.5, -2.0], [5.0, 4.0]),
    _squares(3, "powell_badly_scaled", powell_badly_scaled, [0.0, 1.0], BADLY_SCALED),
    _squares(4, "brown_badly_scaled", of(lambda a, b: [a - 1e6, b - 2e-6, a * b - 2]), [1.0, 1.0],
        [1e6, 2e-6]),
    _squares(5, "beale", beale, [1.0, 1.0], [3.0, 0.5]),
    _squares(6, "jennrich_sampson", of(lambda a, b: 2 + 2 * I10 - torch.exp(I10 * a) - torch.exp(I10 * b)),
        [0.3, 0.4]),
    _squares(7, "helical_valley", helical_valley, [-1.0, 0, 0], [1.0, 0.0, 0.0]),
    _squares(8, "bard", of(lambda a, b, c:
        BARD - a - I15 / ((16 - I15) * b + torch.minimum(I15, 16 - I15) * c)),
        [1.0, 1.0, 1.0]),
    _squares(9, "gaussian", of(lambda a, b, c: a * torch.exp(-0.5 * b * ((8 - I15) / 2 - c) ** 2) - BELL),
        [0.4, 1.0, 0.0]),
    _squares(11, "gulf", of(lambda a, b, c: torch.exp(-((GULF - b).abs() ** c) / a) - T99),
        [5.0, 2.5, 0.15], [50.0, 25.0, 1.5]),
    _squares(12, "box_3d", of(lambda a, b, c:
        torch.exp(-T10 * a) - torch.exp(-T10 * b) - c * (torch.exp(-T10) - torch.exp(-10 * T10))),
        [0.0, 10.0, 20.0], [1.0, 10.0, 1.0]),
    _squares(13, "powell_singular", powell_singular, [3.0, -1, 0, 1], 4 * [0.0]),
    _squares(14, "wood", of(lambda a, b, c, d: [10 * (b - a * a), 1 - a, 90**0.5 * (d - c * c), 1 - c,
        10**0.5 * (b + d - 2), (b - d) / 10**0.5]), [-3.0, -1.0, -3.0, -1.0], 4 * [1.0]),
    _squares(15, "kowalik_osborne", of(lambda a, b, c, d:
        KOWALIK - a * (U * U + U * b) / (U * U + U * c + d)),
        [0.25, 0.39, 0.415, 0.39]),
    _squares(16, "brown_dennis", of(lambda a, b, c, d:
        (a + T20 * b - T20.exp()) ** 2 + (c + d * T20.sin() - T20.cos()) ** 2),
        [25.0, 5.0, -5.0, -1.0]),
    _squares(18, "biggs_exp6", of(lambda a, b, c, d, e, f:
        c * torch.exp(-T13 * a) - d * torch.exp(-T13 * b) + f * torch.exp(-T13 * e) - BIGGS),
        [1.0, 2, 1, 1, 1, 1], [1.0, 10, 1, 5, 4, 3]),
    _squares(20, "watson_6", watson, 6 * [0.0]),
    _squares(23, "penalty_1_4", penalty_1, [1.0, 2.0, 3.0, 4.0]),
    _squares(24, "penalty_2_4", penalty_2, 4 * [0.5]),
    _squares(25, "variably_dimensioned_10", variably_dimensioned, NEARLY_ONE, 10 * [1.0]),
    _squares(26, "trigonometric_10", trigonometric, 10 * [0.1], 10 * [0.0]),
    _squares(30, "broyden_tridiagonal_10", broyden_tridiagonal, 10 * [-1.0]),
    _squares(31, "broyden_banded_10", broyden_banded, 10 * [-1.0]),
    _squares(35, "chebyquad_8", chebyquad, even(8)),
    _minimiser("rosenbrock_5", rosenbrock_chain, [1.3, 0.7, 0.8, 1.9, 1.2],
        "scipy.optimize.minimize, the example of its documentation", 5 * [1.0]),
    _minimiser("maximum_entropy", maximum_entropy, [0.0, 0.0, 0.0],
        "scipy, optimize/tests/test_optimize.py, CheckOptimize", [0.0, -0.524869316, 0.487525860]),
    _minimiser("rosenbrock_0", rosenbrock_chain, [0.0, 0.0], JAXOPT_MINIMISER.format("test_correctness"),
        [1.0, 1.0]),
    _minimiser("eggholder", eggholder, [100.0, 100.0],
        JAXOPT_MINIMISER.format("test_against_scipy, eggholder")),
    _minimiser("zakharov_6", zakharov, [600.0, 700.0, 200.0, 100.0, 90.0, 1e4],
        JAXOPT_MINIMISER.format("test_zakharov"), 6 * [0.0]),
    _minimiser("himmelblau",
        lambda x: (x[:, 0] ** 2 + x[:, 1] - 11) ** 2 + (x[:, 0] + x[:, 1] ** 2 - 7) ** 2,
        [2.0, 2.5], OPTIMISTIX_MINIMISER.format("himmelblau"), [3.0, 2.0]),
    _minimiser("matyas", lambda x: 0.26 * (x * x).sum(1) - 0.48 * x[:, 0] * x[:, 1], [6.0, 6.0],
        OPTIMISTIX_MINIMISER.format("matyas"), [0.0, 0.0]),
    _minimiser("bowl_20", lambda x: (x * (x @ BOWL)).sum(1), 20 * [0.05],
        OPTIMISTIX_MINIMISER.format("bowl, numbers drawn anew"), 20 * [0.0]),
    _minimiser("beale_2_0", sum_of_squares(beale), [2.0, 0.0], OPTIMISTIX_MINIMISER.format("beale"),
        [3.0, 0.5]),
]  # fmt: skip

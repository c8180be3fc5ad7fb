"""20 systems ``F(z) = 0``: scipy's, and those of Moré, Garbow and Hillstrom (MGH) and MINPACK.

Each is posed as ``z = z - F(z)`` with the signs, the order and the scale of its source.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from problems import nonlinear_systems as known
from problems.collections.collected import Collected
from problems.nonlinear_systems import MGH, SCIPY

MINPACK = MGH + ", as a square system in MINPACK's tests"


def scipy_f(x: Tensor) -> Tensor:
    """``-d x - 0.01 |x|^2 x``, d = (3, 2, 1.5, 1, 0.5)."""
    return -known.cubic(x)


def pressure_network(x: Tensor) -> Tensor:
    """Drops ``k x_i^2`` of four parallel pipes (k = 1/2) less the first one's; a total flow of 4."""
    drop = 0.5 * x * x
    return torch.cat([drop[:, 1:] - drop[:, :1], x.sum(1, keepdim=True) - 4], 1)


def root_example(x: Tensor) -> Tensor:
    """``x_1 + (x_1 - x_2)^3 / 2 - 1``, ``(x_2 - x_1)^3 / 2 + x_2``."""
    difference = x[:, 0] - x[:, 1]
    half = 0.5 * difference**3
    return torch.stack([x[:, 0] + half - 1, x[:, 1] - half], 1)


def fsolve_example(x: Tensor) -> Tensor:
    """``x_1 cos x_2 - 4``, ``x_1 x_2 - x_2 - 5``."""
    return torch.stack([x[:, 0] * x[:, 1].cos() - 4, x[:, 0] * x[:, 1] - x[:, 1] - 5], 1)


def rosenbrock(x: Tensor) -> Tensor:
    """MGH 1: ``10 (x_2 - x_1^2)``, ``1 - x_1``."""
    return torch.stack([10 * (x[:, 1] - x[:, 0] ** 2), 1 - x[:, 0]], 1)


def helical_valley(x: Tensor) -> Tensor:
    """MGH 7: ``10 (x_3 - 10 theta)``, ``10 (r - 1)``, ``x_3``; theta in turns, from -1/4 to 3/4."""
    second, third, first = known.helical_valley(x).unbind(1)
    return torch.stack([first, second, third], 1)


def variably_dimensioned(x: Tensor) -> Tensor:
    """``x_k - 1 + k s (1 + 2 s^2)``, ``s = sum_j j (x_j - 1)``: half the gradient of MGH 25."""
    k = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)
    total = (k * (x - 1)).sum(1, keepdim=True)
    return x - 1 + k * total * (1 + 2 * total * total)


_system = partial(Collected, "system")


def even(n: int) -> list[float]:
    """``i / (n + 1)``."""
    return [i / (n + 1) for i in range(1, n + 1)]


def parabola(n: int) -> list[float]:
    """``t_i (t_i - 1)``."""
    return [t * (t - 1) for t in even(n)]


SYSTEMS: list[Collected] = [
    _system("F", scipy_f, 5 * [1.0], SCIPY.format("F"), 5 * [0.0]),
    _system("F2", known.identity, [1.0, 2, 3, 4, 5, 6], SCIPY.format("F2"), 6 * [0.0]),
    _system("F3", known.tridiagonal, [1.0, 2, 3], SCIPY.format("F3"), [-2.5, -4.0, -3.5]),
    _system("F4_powell", known.powell_badly_scaled, [-1.0, -2.0], SCIPY.format("F4_powell"),
        [1.0981593296999225e-05, 9.106146739866525]),
    _system("F5", pressure_network, [2.0, 0, 2, 0], SCIPY.format("F5"), 4 * [1.0]),
    _system("F6", known.scipy_f6, [-0.5, 1.4], SCIPY.format("F6")),
    _system("root_example", root_example, [0.0, 0.0],
        "scipy.optimize.root, the example of its documentation", [0.8411639019140096,
        0.1588360980859904]),
    _system("fsolve_example", fsolve_example, [1.0, 1.0],
        "scipy.optimize.fsolve, the example of its documentation", [6.50409711, 0.90841421]),
    _system("rosenbrock", rosenbrock, [-1.2, 1.0], MGH.format(1), [1.0, 1.0]),
    _system("helical_valley", helical_valley, [-1.0, 0, 0], MGH.format(7), [1.0, 0.0, 0.0]),
    _system("powell_singular", known.powell_singular, [3.0, -1, 0, 1], MGH.format(13), 4 * [0.0]),
    _system("variably_dimensioned_10", variably_dimensioned, [1 - k / 10 for k in range(1, 11)],
        MINPACK.format(25), 10 * [1.0]),
    _system("trigonometric_10", known.trigonometric, 10 * [0.1], MGH.format(26), 10 * [0.0]),
    _system("brown_almost_linear_10", known.brown_almost_linear, 10 * [0.5], MGH.format(27),
        10 * [1.0]),
    _system("boundary_value_10", known.discrete_boundary_value, parabola(10), MGH.format(28)),
    _system("discrete_integral_10", known.discrete_integral, parabola(10), MGH.format(29)),
    _system("broyden_tridiagonal_10", known.broyden_tridiagonal, 10 * [-1.0], MGH.format(30)),
    _system("broyden_banded_10", known.broyden_banded, 10 * [-1.0], MGH.format(31)),
    _system("chebyquad_5", known.chebyquad, even(5), MGH.format(35)),
    _system("chebyquad_7", known.chebyquad, even(7), MGH.format(35)),
]  # fmt: skip

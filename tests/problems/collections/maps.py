"""17 maps ``z = f(z)``: the fixed points of scipy's, jaxopt's and optimistix's tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from scipy.special import lambertw
from torch import Tensor

from problems.collections.collected import Collected

SCIPY = "scipy, optimize/tests/test_minpack.py, TestFixedPoint.{}"
JAXOPT = "jaxopt, tests/anderson_test.py, {}"
OPTIMISTIX = "optimistix, tests/helpers.py, fixed_point_fn_init_args, {}"
ANGLES = tuple(torch.pi / divisor for divisor in (2, 3, 4, 5, 6, 1.27, 1.73))


def double(z: Tensor) -> Tensor:
    """``2 z``."""
    return 2 * z


def weighted_square(z: Tensor, weights: tuple[float, ...]) -> Tensor:
    """``c z^2``; fixed points 0 and ``1 / c``."""
    return z.new_tensor(weights) * z * z


def weighted_root(z: Tensor, weights: tuple[float, ...]) -> Tensor:
    """``c sqrt(z)``; fixed points 0 and ``c^2``; not a number below zero."""
    return z.new_tensor(weights) * z.sqrt()


def lambert(z: Tensor) -> Tensor:
    """``exp(-2 z) / 2``; ``z = W(1) / 2``."""
    return torch.exp(-2 * z) / 2


def logarithmic(z: Tensor) -> Tensor:
    """``log(k_l / (k_s z)) / log(i_0 z / (z - 1)) + 1`` of scipy's issue 5460; ``z = m = 1.3``."""
    ks, kl, m = 2.0, 6.0, 1.3
    i0 = (m - 1) / m * (kl / ks / m) ** (1 / (m - 1))
    return torch.log(kl / ks / z) / torch.log(i0 * z / (z - 1)) + 1


def rational_root(z: Tensor) -> Tensor:
    """``sqrt(c_1 / (z + c_2))``, c_1 = (10, 12), c_2 = (3, 5)."""
    return (z.new_tensor([10.0, 12.0]) / (z + z.new_tensor([3.0, 5.0]))).sqrt()


def geometric(z: Tensor) -> Tensor:
    """``(0.9, 0.99, 0.999) z``."""
    return z.new_tensor([0.9, 0.99, 0.999]) * z


def halfway(z: Tensor) -> Tensor:
    """``(z + 1) / 2``."""
    return 0.5 * z + 0.5


def sine_and_powers(z: Tensor) -> Tensor:
    """``z^2 sin z`` (three coordinates), ``z^3`` (two), ``-z`` (four); z = 0."""
    first, second, third = z.split([3, 2, 4], dim=1)
    return torch.cat([first.sin() * first.square(), second**3, -third], 1)


def shifted_cosine(z: Tensor) -> Tensor:
    """``cos z + (0, pi / 2)``."""
    return z.cos() + z.new_tensor([0.0, torch.pi / 2])


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


def affine(z: Tensor) -> Tensor:
    """``M z + b``, M of spectral radius about 1/2."""
    return z @ MATRIX.to(z) + OFFSET.to(z)


def exponential(z: Tensor) -> Tensor:
    """``exp(-z)``: the omega constant in each of 28 coordinates."""
    return torch.exp(-z)


MIDPOINT = torch.randn(28, 28, generator=torch.Generator().manual_seed(19), dtype=torch.float64)


def midpoint_stage(z: Tensor) -> Tensor:
    """The implicit midpoint stage ``M (y_0 + dt z)`` from ``y_0 = 0``, ``dt = 1/16``; z = 0."""
    return z @ MIDPOINT.to(z).mT / 16


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
    _map("double", double, (1.0,), (0.0,), SCIPY.format("test_scalar_trivial")),
    _map("square", partial(weighted_square, weights=(1.0,)), (1.05,), (1.0,),
        SCIPY.format("test_scalar_basic1")),
    _map("root", partial(weighted_root, weights=(1.0,)), (1.05,), (1.0,),
        SCIPY.format("test_scalar_basic2")),
    _map("double_2", double, (0.3, 0.15), (0.0, 0.0), SCIPY.format("test_array_trivial")),
    _map("square_3", partial(weighted_square, weights=SQUARES), (1.1, 1.15, 0.9),
        tuple(1 / c for c in SQUARES), SCIPY.format("test_array_basic1")),
    _map("root_3", partial(weighted_root, weights=ROOTS), (0.8, 1.1, 1.1),
        tuple(c * c for c in ROOTS), SCIPY.format("test_array_basic2")),
    _map("lambert", lambert, (1.0,), (OMEGA / 2,), SCIPY.format("test_lambertw")),
    _map("issue_5460", logarithmic, (1.001,), (1.3,), SCIPY.format("test_no_acceleration")),
    _map("rational_root", rational_root, (1.2, 1.3), (1.4920333, 1.37228132),
        "scipy.optimize.fixed_point, the example of its documentation"),
    _map("geometric", geometric, (1.0, 0.4, -0.2), (0.0, 0.0, 0.0),
        JAXOPT.format("test_geometric_decay")),
    _map("halfway", halfway, (0.0,), (1.0,), JAXOPT.format("test_support_for_scalars")),
    _map("sine_and_powers", sine_and_powers, (0.6, 0.0, -0.1, 0.7, 0.5, -1 / 3, 0.0, 2 / 3,
        -0.4 / 3), 9 * (0.0,), JAXOPT.format("test_sin_fixed_point")),
    _map("shifted_cosine", shifted_cosine, (0.3, torch.pi / 4), (DOTTIE, torch.pi / 2),
        JAXOPT.format("test_cos_fixed_point")),
    _map("rotation", rotation, _NEAR, _CENTRE, JAXOPT.format("test_rotation_map")),
    _map("affine_200", affine, 200 * (0.0,), torch.linalg.solve(torch.eye(200,
        dtype=torch.float64) - MATRIX, OFFSET).tolist(),
        JAXOPT.format("test_affine_contractive_mapping, numbers drawn anew")),
    _map("exponential_28", exponential, 28 * (0.5,), 28 * (OMEGA,),
        OPTIMISTIX.format("_exponential")),
    _map("midpoint_28", midpoint_stage, 28 * (0.5,), 28 * (0.0,),
        OPTIMISTIX.format("_midpoint_f_linear, numbers drawn anew")),
]  # fmt: skip

"""Systems and minimisers of the literature with their starts: facts that nobody wrote for this package.

Where a source is a test collection, it is abbreviated: LMR is W. La Cruz, J. M. Martínez, M. Raydan,
"Spectral residual method without gradient information", Math. Comp. 75 (2006), technical report; LV is
L. Lukšan, J. Vlček, "Sparse and partially separable test problems for unconstrained and equality constrained
optimization" (1999), problems of systems; CUTE is I. Bongartz, A. Conn, N. Gould, Ph. Toint, ACM Trans.
Math. Softw. 21 (1995); BF is R. Burden, J. Faires, "Numerical Analysis", chapter 10; MGH as in ``collected``.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import solvers
from problems.collected import (
    BADLY_SCALED,
    BIGGS,
    F64,
    MGH,
    NEARLY_ONE,
    T10,
    T13,
    Collected,
    brown_almost_linear,
    broyden_banded,
    broyden_tridiagonal,
    chebyquad,
    counted,
    cubic,
    data,
    discrete_boundary_value,
    discrete_integral,
    even,
    grid,
    helical_valley,
    numbers,
    of,
    parabola,
    penalty_1,
    penalty_2,
    powell_badly_scaled,
    powell_singular,
    pressure_network,
    rosenbrock,
    rosenbrock_chain,
    scipy_f6,
    shift_down,
    shift_up,
    trigonometric,
    variably_dimensioned_system,
    watson,
)
from problems.collected import (
    MINIMISERS as TEXTBOOK,
)
from problems.collected import (
    sum_of_squares as squares,
)

LMR, LV = "LMR, function {}", "LV, systems, {}"
CUTE, BF = "CUTE, {}", "BF, section {}"
SIAMFANL = "C. T. Kelley, SIAMFANLEquations.jl, TestProblems, {}"
INTERVAL = "P. Van Hentenryck, D. McAllester, D. Kapur, SIAM J. Numer. Anal. 34 (1997), {}"
BUDGET, STARTS = 2000, {"system": 8, "minimiser": 4}
ROOT, GRADIENT = 1e-8, 1e-5  # a root has |F| <= ROOT, a minimiser |E'| <= GRADIENT max(1, |E|)


def blocks(function: Any, size: int, count: int) -> Any:
    """``function`` of each of ``count`` groups of ``size`` consecutive coordinates."""

    def extended(x: Tensor) -> Tensor:
        values = function(x.reshape(-1, size))
        return values.reshape(len(x), -1) if values.ndim == 2 else values.view(-1, count).sum(1)

    return extended


def wood_gradient(x: Tensor) -> Tensor:
    """MINPACK's system: the gradient of MGH 14 over its common factor 2."""
    a, b, c, d = x.unbind(1)
    s, t = b - a * a, d - c * c
    first, third = -200 * a * s - (1 - a), -180 * c * t - (1 - c)
    second = 200 * s + 20.2 * (b - 1) + 19.8 * (d - 1)
    return torch.stack([first, second, third, 180 * t + 20.2 * (d - 1) + 19.8 * (b - 1)], 1)


def watson_gradient(x: Tensor) -> Tensor:
    """MINPACK's system: half the gradient of MGH 20."""
    order = counted(x, x.shape[1], first=0)
    powers = (numbers(29) / 29)[:, None] ** order
    slopes = pad(powers[:, :-1] * order[1:], (1, 0))
    value, edge = x @ powers.mT, x[:, 1] - x[:, 0] ** 2 - 1
    r = x @ slopes.mT - value**2 - 1
    sides = torch.stack([x[:, 0] - 2 * x[:, 0] * edge, edge], 1)
    return r @ slopes - 2 * (r * value) @ powers + pad(sides, (0, x.shape[1] - 2))


def chandrasekhar(x: Tensor, c: float) -> Tensor:
    """``x_i - 1 / (1 - c / (2 n) sum_j m_i x_j / (m_i + m_j))``, m_i = (i - 1/2) / n."""
    n = x.shape[1]
    m = (counted(x, n) - 0.5) / n
    kernel = m[:, None] / (m[:, None] + m)
    return x - 1 / (1 - c / (2 * n) * (x @ kernel.mT))


def bratu(x: Tensor, factor: float) -> Tensor:
    """``-u'' = factor exp(u)`` on [0, 1], u = 0 at both ends."""
    h, _ = grid(x)
    return 2 * x - shift_down(x) - shift_up(x) - h * h * factor * torch.exp(x)


def beam(x: Tensor) -> Tensor:
    """``-u'' = 20 sin u`` on [0, 1], u = 0 at both ends."""
    h, _ = grid(x)
    return 2 * x - shift_down(x) - shift_up(x) - 20 * h * h * torch.sin(x)


def convection(x: Tensor) -> Tensor:
    """``-u_xx - u_yy + 20 u (u_x + u_y)`` on a grid of 7 x 7 less its values at a smooth u."""
    t = torch.arange(1, 8, dtype=F64) / 8
    known = 10 * t[:, None] * t * (1 - t[:, None]) * (1 - t) * torch.exp(t[:, None] ** 4.5)

    def operator(u: Tensor) -> Tensor:
        p = pad(u, (1, 1, 1, 1))
        left, right, low, high = p[:, 1:-1, :-2], p[:, 1:-1, 2:], p[:, :-2, 1:-1], p[:, 2:, 1:-1]
        return 4 * u - left - right - low - high + 10 / 8 * u * (right - left + high - low)

    return (operator(x.view(-1, 7, 7)) - operator(known[None])).flatten(1)


def trigexp(x: Tensor) -> Tensor:
    first, last = x[:, :-1], x[:, 1:]
    ahead = 3 * first**3 + 2 * last - 5 + torch.sin(first - last) * torch.sin(first + last)
    behind = 4 * last - first * torch.exp(first - last) - 3
    return pad(ahead, (0, 1)) + pad(behind, (1, 0))


def tridiagonal_cubic(x: Tensor) -> Tensor:
    """``8 x_i (x_i^2 - x_{i-1}) - 2 (1 - x_i)`` but for i = 1, ``+ 4 (x_i - x_{i+1}^2)`` but for i = n."""
    ahead, last = 4 * (x[:, :-1] - x[:, 1:] ** 2), x[:, 1:]
    behind = 8 * last * (last**2 - x[:, :-1]) - 2 * (1 - last)
    return pad(ahead, (0, 1)) + pad(behind, (1, 0))


def exponential_1(x: Tensor) -> Tensor:
    """``exp(x_1 - 1) - 1``, ``i (exp(x_i - 1) - x_i)``."""
    rest = counted(x, x.shape[1])[1:] * (torch.exp(x[:, 1:] - 1) - x[:, 1:])
    return torch.cat([torch.expm1(x[:, :1] - 1), rest], 1)


def exponential_2(x: Tensor) -> Tensor:
    """``exp(x_1) - 1``, ``i / 10 (exp(x_i) + x_{i-1} - 1)``."""
    rest = counted(x, x.shape[1])[1:] / 10 * (torch.expm1(x[:, 1:]) + x[:, :-1])
    return torch.cat([torch.expm1(x[:, :1]), rest], 1)


def singular_cubic(x: Tensor) -> Tensor:
    """``i x_i^3 / 3 - x_i^2 / 2 + x_{i+1}^2 / 2``, the second term but for i = 1."""
    square = x * x / 2
    return counted(x, x.shape[1]) * x**3 / 3 - pad(square[:, 1:], (1, 0)) + shift_up(square)


def double_trigonometric(x: Tensor) -> Tensor:
    """``2 (n + i (1 - cos x_i) - sin x_i - sum cos x_j) (2 sin x_i - cos x_i)``."""
    return 2 * trigonometric(x) * (2 * x.sin() - x.cos())


# The coefficients of the interval benchmark "i1" and the three unknowns that each multiplies.
OFFSETS = (0.25428722, 0.37842197, 0.27162577, 0.19807914, 0.44166728, 0.14654113, 0.42937161,
    0.07056438, 0.34504906, 0.42651102)  # fmt: skip
FACTORS = (0.18324757, 0.16275449, 0.16955071, 0.15585316, 0.19950920, 0.18922793, 0.21180486,
    0.17081208, 0.19612740, 0.21466544)  # fmt: skip
TRIPLES = ((4, 3, 9), (1, 10, 6), (1, 2, 10), (7, 1, 6), (7, 6, 3), (8, 5, 10), (2, 5, 8), (1, 7, 6),
    (10, 6, 8), (4, 8, 1))  # fmt: skip


def products_of_three(x: Tensor) -> Tensor:
    return x - data(*OFFSETS) - data(*FACTORS) * x[:, torch.tensor(TRIPLES) - 1].prod(2)


def combustion(x: Tensor) -> Tensor:
    """Propane in air: R. Meintjes, A. Morgan, ACM Trans. Math. Softw. 16 (1990)."""
    a, b, c, d, e = x.unbind(1)
    r, s = 10.0, 40**0.5
    r5, r6, r7, r8, r9, r10 = (
        0.193,
        0.002597 / s,
        0.003448 / s,
        1.799e-5 / 40,
        2.155e-4 / s,
        3.846e-5 / 40,
    )
    return torch.stack([
        a * b + a - 3 * e,
        2 * a * b + a + b * c**2 + r8 * b - r * e + 2 * r10 * b**2 + r7 * b * c + r9 * b * d,
        2 * b * c**2 + 2 * r5 * c**2 - 8 * e + r6 * c + r7 * b * c,
        r9 * b * d + 2 * d**2 - 4 * r * e,
        a * (b + 1) + r10 * b**2 + b * c**2 + r8 * b + r5 * c**2 + d**2 - 1 + r6 * c + r7 * b * c
            + r9 * b * d,
    ], 1)  # fmt: skip


def heart_dipole(x: Tensor) -> Tensor:
    """Two dipoles of the human heart: J. Nelson, C. Hodgkin (1981); eight moments."""
    a, b, c, d, t, u, v, w = x.unbind(1)
    even_t, even_u, odd_t, odd_u = t * t - v * v, u * u - w * w, 2 * t * v, 2 * u * w
    p, q = t * (t * t - 3 * v * v), v * (v * v - 3 * t * t)
    r, s = u * (u * u - 3 * w * w), w * (w * w - 3 * u * u)
    moments = [
        a + b, c + d, t * a + u * b - v * c - w * d, v * a + w * b + t * c + u * d,
        a * even_t - c * odd_t + b * even_u - d * odd_u, c * even_t + a * odd_t + d * even_u + b * odd_u,
        a * p + c * q + b * r + d * s, c * p - a * q + d * r - b * s,
    ]  # fmt: skip
    return torch.stack(moments, 1) - data(
        0.485, -0.0019, -0.0581, 0.015, 0.105, 0.0406, 0.167, -0.399
    )


def neurophysiology(x: Tensor) -> Tensor:
    a, b, c, d, e, f = x.unbind(1)
    return torch.stack([
        a * a + c * c - 1, b * b + d * d - 1, e * c**3 + f * d**3, e * a**3 + f * b**3,
        e * a * c * c + f * d * d * b, e * a * a * c + f * b * b * d], 1)  # fmt: skip


def robot(x: Tensor) -> Tensor:
    """Inverse kinematics of an elbow manipulator."""
    a, b, c, d, e, f, g, h = x.unbind(1)
    return torch.stack([
        0.004731 * a * c - 0.3578 * b * c - 0.1238 * a + g - 0.001637 * b - 0.9338 * d - 0.3571,
        0.2238 * a * c + 0.7623 * b * c + 0.2638 * a - g - 0.07745 * b - 0.6734 * d - 0.6022,
        f * h + 0.3578 * a + 0.004731 * b, -0.7623 * a + 0.2238 * b + 0.3461,
        a * a + b * b - 1, c * c + d * d - 1, e * e + f * f - 1, g * g + h * h - 1], 1)  # fmt: skip


HEART = [0.299, 0.186, -0.0273, 0.0254, -0.474, 0.474, -0.0892, 0.0892]
_system = partial(Collected, "system")
_minimiser = partial(Collected, "minimiser")
cragg_levy = of(
    lambda a, b, c, d: [(a.exp() - b) ** 2, 10 * (b - c) ** 3, (c - d).tan() ** 2, d - 1]
)
freudenstein_roth = of(
    lambda a, b: [a + ((5 - b) * b - 2) * b - 13, a + ((b + 1) * b - 14) * b - 29]
)
PI, E = math.pi, math.e

SYSTEMS: list[Collected] = [
    # Moré, Garbow and Hillstrom, as square systems in MINPACK's tests or of their section on systems
    _system("rosenbrock", rosenbrock, [-1.2, 1.0], MGH.format(1), [1.0, 1.0]),
    _system("freudenstein_roth", freudenstein_roth, [0.5, -2.0], MGH.format(2), [5.0, 4.0]),
    _system("powell_badly_scaled", powell_badly_scaled, [0.0, 1.0], MGH.format(3), BADLY_SCALED),
    _system("helical_valley", helical_valley, [-1.0, 0.0, 0.0], MGH.format(7), [1.0, 0.0, 0.0]),
    _system("box_3", of(lambda a, b, c: torch.exp(-T10[:3] * a) - torch.exp(-T10[:3] * b)
        - c * (torch.exp(-T10[:3]) - torch.exp(-10 * T10[:3]))), [0.0, 10.0, 20.0], MGH.format(12),
        [1.0, 10.0, 1.0]),
    _system("powell_singular", powell_singular, [3.0, -1.0, 0.0, 1.0], MGH.format(13), 4 * [0.0]),
    _system("wood", wood_gradient, [-3.0, -1.0, -3.0, -1.0], MGH.format(14), 4 * [1.0]),
    _system("biggs_6", of(lambda a, b, c, d, e, f: c * torch.exp(-T13[:6] * a) - d * torch.exp(-T13[:6] * b)
        + f * torch.exp(-T13[:6] * e) - BIGGS[:6]), [1.0, 2.0, 1.0, 1.0, 1.0, 1.0], MGH.format(18),
        [1.0, 10.0, 1.0, 5.0, 4.0, 3.0]),
    _system("watson_6", watson_gradient, 6 * [0.0], MGH.format(20)),
    _system("extended_rosenbrock_20", blocks(rosenbrock, 2, 10), 10 * [-1.2, 1.0], MGH.format(21),
        20 * [1.0]),
    _system("extended_powell_12", blocks(powell_singular, 4, 3), 3 * [3.0, -1.0, 0.0, 1.0], MGH.format(22),
        12 * [0.0]),
    _system("variably_dimensioned_10", variably_dimensioned_system, NEARLY_ONE, MGH.format(25), 10 * [1.0]),
    _system("trigonometric_10", trigonometric, 10 * [0.1], MGH.format(26), 10 * [0.0]),
    _system("brown_almost_linear_10", brown_almost_linear, 10 * [0.5], MGH.format(27), 10 * [1.0]),
    _system("brown_almost_linear_30", brown_almost_linear, 30 * [0.5], MGH.format(27), 30 * [1.0]),
    _system("boundary_value_10", discrete_boundary_value, parabola(10), MGH.format(28)),
    _system("boundary_value_40", discrete_boundary_value, parabola(40), MGH.format(28)),
    _system("discrete_integral_10", discrete_integral, parabola(10), MGH.format(29)),
    _system("broyden_tridiagonal_10", broyden_tridiagonal, 10 * [-1.0], MGH.format(30)),
    _system("broyden_tridiagonal_100", broyden_tridiagonal, 100 * [-1.0], MGH.format(30)),
    _system("broyden_banded_10", broyden_banded, 10 * [-1.0], MGH.format(31)),
    _system("broyden_banded_100", broyden_banded, 100 * [-1.0], MGH.format(31)),
    *[_system(f"chebyquad_{n}", chebyquad, even(n), MGH.format(35)) for n in (5, 6, 7, 9)],
    # scipy, NLsolve and SIAMFANLEquations
    _system("cubic", lambda x: -cubic(x), 5 * [1.0], "scipy, test_nonlin.py, F", 5 * [0.0]),
    _system("powell_scipy", powell_badly_scaled, [-1.0, -2.0], "scipy, test_nonlin.py, F4", BADLY_SCALED),
    _system("pressure_network", pressure_network, [2.0, 0.0, 2.0, 0.0], "scipy, test_nonlin.py, F5",
        4 * [1.0]),
    _system("scipy_f6", scipy_f6, [-0.5, 1.4], "scipy, test_nonlin.py, F6"),
    _system("nlsolve_2", of(lambda a, b: [(a + 3) * (b**3 - 7) + 18, torch.sin(b * a.exp() - 1)]),
        [-0.5, 1.4], "NLsolve.jl, test/2by2.jl", [0.0, 1.0]),
    _system("cosine", lambda x: x.cos() - x, [0.5], SIAMFANL.format("fcos"), [0.7390851332151607]),
    _system("arctangent", torch.atan, [10.0], SIAMFANL.format("atan"), [0.0]),
    _system("simple_near", of(lambda a, b: [a * a + b * b - 2, (a - 1).exp() + b * b - 2]), [2.0, 0.5],
        SIAMFANL.format("simple!"), [1.0, 1.0]),
    _system("simple_far", of(lambda a, b: [a * a + b * b - 2, (a - 1).exp() + b * b - 2]), [3.0, 5.0],
        SIAMFANL.format("simple!"), [1.0, 1.0]),
    _system("h_equation_0.5", partial(chandrasekhar, c=0.5), 32 * [1.0], SIAMFANL.format("heqf!")),
    _system("h_equation_0.99", partial(chandrasekhar, c=0.99), 32 * [1.0], SIAMFANL.format("heqf!")),
    _system("beam_31", beam, [i / 32 * (1 - i / 32) for i in range(1, 32)], SIAMFANL.format("FBeam!")),
    _system("convection_49", convection, 49 * [0.0], SIAMFANL.format("pdeF!, root prescribed on its grid")),
    # La Cruz, Martínez and Raydan; Lukšan and Vlček
    _system("exponential_1_10", exponential_1, 10 * [10 / 9], LMR.format(1), 10 * [1.0]),
    _system("exponential_2_10", exponential_2, 10 * [0.01], LMR.format(2), 10 * [0.0]),
    _system("double_trigonometric_10", double_trigonometric, 10 * [0.101], LMR.format(8)),
    _system("singular_cubic_10", singular_cubic, 10 * [1.0], LMR.format(9), 10 * [0.0]),
    _system("logarithm_20", lambda x: torch.log1p(x) - x / x.shape[1], 20 * [1.0], LMR.format(10),
        20 * [0.0]),
    _system("trigexp_20", trigexp, 20 * [0.0], LMR.format(12), 20 * [1.0]),
    _system("convex_2_20", lambda x: counted(x, 20) / 10 * torch.expm1(x), 20 * [1.0], LMR.format(16),
        20 * [0.0]),
    _system("bratu_20", partial(bratu, factor=2.0), 20 * [0.0],
        "MINPACK-2, solid fuel ignition, one dimension"),
    _system("tridiagonal_cubic_10", tridiagonal_cubic, 10 * [12.0], LV.format("tridiagonal"), 10 * [1.0]),
    _system("singular_broyden_10", lambda x: broyden_tridiagonal(x) ** 2, 10 * [-1.0],
        LV.format("singular Broyden")),
    _system("extended_freudenstein_10", blocks(freudenstein_roth, 2, 5), 5 * [6.0, 3.0],
        LV.format("extended Freudenstein and Roth"), 5 * [5.0, 4.0]),
    _system("extended_cragg_levy_8", blocks(cragg_levy, 4, 2), 2 * [1.0, 2.0, 2.0, 2.0],
        LV.format("extended Cragg and Levy"), 2 * [0.0, 1.0, 1.0, 1.0]),
    # single systems
    _system("interval_i1", products_of_three, 10 * [0.0], INTERVAL.format("i1")),
    _system("neurophysiology", neurophysiology, [0.8, 0.5, 0.5, 0.8, 0.3, -0.3],
        INTERVAL.format("neurophysiology")),
    _system("robot", robot, [0.164, -0.98, -0.94, -0.32, -0.99, -0.056, 0.41, -0.91],
        INTERVAL.format("kin1")),
    _system("combustion", combustion, [0.05, 10.0, 0.05, 0.9, 0.05], "Meintjes and Morgan (1990), table 2",
        [3.114102e-3, 34.59792, 0.06504177, 0.8593780, 0.03695185]),
    _system("heart_dipole", heart_dipole, HEART, "MINPACK-2, human heart dipole"),
    _system("exponential_sine", of(lambda a, b: [(a * a + b * b).exp() - 3, a + b - torch.sin(3 * (a + b))]),
        [0.81, 0.82], "P. Deuflhard, Newton Methods for Nonlinear Problems, expsin"),
    _system("chow_yorke_10", lambda x: x - torch.exp(torch.cos(counted(x, 10) * x.sum(1, keepdim=True))),
        10 * [0.0], "L. Watson, SIAM J. Numer. Anal. 16 (1979), exponential cosine"),
    _system("griewank_osborne", of(lambda a, b: [29 / 16 * a**3 - 2 * a * b, b - a * a]), [-0.5, 0.5],
        "A. Griewank, M. Osborne, SIAM J. Numer. Anal. 20 (1983)", [0.0, 0.0]),
    _system("boggs", of(lambda a, b: [a * a - b + 1, a - torch.cos(PI / 2 * b)]), [1.0, 0.0],
        "P. Boggs, SIAM J. Numer. Anal. 8 (1971)", [0.0, 1.0]),
    _system("brown_gearhart", of(lambda a, b, c: [a * a + 2 * b * b - 4, a * a + b * b + c - 8,
        (a - 1) ** 2 + (2 * b - 2**0.5) ** 2 + (c - 5) ** 2 - 4]), [1.0, 0.7, 5.0],
        "K. Brown, W. Gearhart, Numer. Math. 16 (1971)", [0.0, 2**0.5, 6.0]),
    _system("powell_1970", of(lambda a, b: [a, 10 * a / (a + 0.1) + 2 * b * b]), [3.0, 1.0],
        "J. Nocedal, S. Wright, Numerical Optimization, section 11.2", [0.0, 0.0]),
    _system("ferraris_tronconi", of(lambda a, b: [0.5 * torch.sin(a * b) - b / (4 * PI) - a / 2,
        (1 - 1 / (4 * PI)) * ((2 * a).exp() - E) + E * b / PI - 2 * E * a]), [0.6, 3.0],
        "D. Ferraris, D. Tronconi, Comput. Chem. Eng. 10 (1986)", [0.5, PI]),
    _system("dennis_schnabel", of(lambda a, b: [a + b - 3, a * a + b * b - 9]), [1.0, 5.0],
        "J. Dennis, R. Schnabel, Numerical Methods for Unconstrained Optimization, example 5.1.1",
        [0.0, 3.0]),
    _system("burden_1", of(lambda a, b, c: [3 * a - torch.cos(b * c) - 0.5, a * a - 81 * (b + 0.1) ** 2
        + c.sin() + 1.06, torch.exp(-a * b) + 20 * c + (10 * PI - 3) / 3]), [0.1, 0.1, -0.1],
        BF.format("10.1"), [0.5, 0.0, -PI / 6]),
    _system("burden_2", of(lambda a, b: [a * a - 10 * a + b * b + 8, a * b * b + a - 10 * b + 8]), [0.0, 0.0],
        BF.format("10.1"), [1.0, 1.0]),
    _system("burden_3", of(lambda a, b: [4 * a * a - 20 * a + b * b / 4 + 8,
        a * b * b / 2 + 2 * a - 5 * b + 8]), [0.0, 0.0], BF.format("10.2"), [0.5, 2.0]),
    _system("burden_4", of(lambda a, b: [torch.sin(4 * PI * a * b) - 2 * b - a, (4 * PI - 1) / (4 * PI)
        * ((2 * a).exp() - E) + 4 * E * b * b - 2 * E * a]), [0.0, 0.0], BF.format("10.2")),
    _system("burden_5", of(lambda a, b, c: [10 * a - 2 * b * b + b - 2 * c - 5, 8 * b * b + 4 * c * c - 9,
        8 * b * c + 4]), [1.0, 1.0, -1.0], BF.format("10.4"), [0.5, 1.0, -0.5]),
]  # fmt: skip


def chained(terms: Any, width: int) -> Any:
    """``sum_i terms(x_i, ..., x_{i + width - 1})``, each a tensor (B, n - width + 1)."""

    def function(x: Tensor) -> Tensor:
        count = x.shape[1] - width + 1
        return terms(*(x[:, k : k + count] for k in range(width))).sum(1)

    return function


def chained_powell(x: Tensor) -> Tensor:
    """CHNPWS: the terms of MGH 13 at coordinates that start at 1, 3, 5, ..."""
    a, b, c, d = (x[:, k : x.shape[1] - 3 + k : 2] for k in range(4))
    return ((a + 10 * b) ** 2 + 5 * (c - d) ** 2 + (b - 2 * c) ** 4 + 10 * (a - d) ** 4).sum(1)


def cragglvy(x: Tensor) -> Tensor:
    """Terms at coordinates that start at 1, 3, 5, ..., as those of ``chained_powell``."""
    a, b, c, d = (x[:, k : x.shape[1] - 3 + k : 2] for k in range(4))
    angle = (c - d).tan() + c - d
    return ((torch.exp(a) - b) ** 4 + 100 * (b - c) ** 6 + angle**4 + a**8 + (d - 1) ** 2).sum(1)


def bdqrtic(x: Tensor) -> Tensor:
    a, b, c, d = (x[:, k : x.shape[1] - 4 + k] for k in range(4))
    quadratic = a**2 + 2 * b**2 + 3 * c**2 + 4 * d**2 + 5 * x[:, -1:] ** 2
    return ((3 - 4 * a) ** 2 + quadratic**2).sum(1)


def dixmaana(x: Tensor) -> Tensor:
    m = x.shape[1] // 3
    a, b, c = x[:, : 2 * m], x[:, m:], x[:, 2 * m :]
    cubes = 0.125 * a[:, : 2 * m] ** 2 * b[:, : 2 * m] ** 4
    return 1 + (x * x).sum(1) + cubes.sum(1) + 0.125 * (x[:, :m] * c[:, :m]).sum(1)


# The data of MGH 10 and 17.
MEYER = data(34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744, 8261, 7030, 6005, 5147, 4427, 3820, 3307,
    2872)  # fmt: skip
OSBORNE = data(0.844, 0.908, 0.932, 0.936, 0.925, 0.908, 0.881, 0.850, 0.818, 0.784, 0.751, 0.718, 0.685,
    0.658,
    0.628, 0.603, 0.580, 0.558, 0.538, 0.522, 0.506, 0.490, 0.478, 0.467, 0.457, 0.448, 0.438, 0.431, 0.424,
    0.420, 0.414, 0.411, 0.406)  # fmt: skip
T33 = 10 * (numbers(33) - 1)


def indexed(terms: Any) -> Any:
    """``sum_i terms(x_i, i)``."""
    return lambda x: terms(x, counted(x, x.shape[1])).sum(1)


_BY_NAME = {problem.name: problem for problem in TEXTBOOK}
_OF_MGH = (
    "rosenbrock freudenstein_roth powell_badly_scaled beale jennrich_sampson helical_valley bard gaussian "
    "gulf "
    "box_3d powell_singular wood kowalik_osborne brown_dennis biggs_exp6 watson_6 variably_dimensioned_10 "
    "trigonometric_10 broyden_tridiagonal_10 broyden_banded_10 chebyquad_8"
)
MINIMISERS: list[Collected] = [
    *[_BY_NAME[name] for name in _OF_MGH.split()],
    _minimiser("penalty_1_10", squares(penalty_1), [float(i) for i in range(1, 11)], MGH.format(23)),
    _minimiser("penalty_2_10", squares(penalty_2), 10 * [0.5], MGH.format(24)),
    _minimiser("brown_almost_linear_10", squares(brown_almost_linear), 10 * [0.5], MGH.format(27)),
    _minimiser("brown_badly_scaled", _BY_NAME["brown_badly_scaled"].function, [1.0, 1.0], MGH.format(4),
        [1e6, 2e-6]),
    _minimiser("meyer", squares(of(lambda a, b, c: a * torch.exp(b / (45 + 5 * numbers(16) + c)) - MEYER)),
        [0.02, 4000.0, 250.0], MGH.format(10)),
    _minimiser("osborne_1", squares(of(lambda a, b, c, d, e: OSBORNE - a - b * torch.exp(-T33 * d)
        - c * torch.exp(-T33 * e))), [0.5, 1.5, -1.0, 0.01, 0.02], MGH.format(17)),
    _minimiser("watson_9", squares(watson), 9 * [0.0], MGH.format(20)),
    _minimiser("extended_powell_100", blocks(squares(powell_singular), 4, 25), 25 * [3.0, -1.0, 0.0, 1.0],
        CUTE.format("POWELLSG"), 100 * [0.0]),
    _minimiser("heart_8", squares(heart_dipole), HEART, CUTE.format("HEART8LS")),
    _minimiser("maratosb", lambda x: x[:, 0] + 1e6 * ((x * x).sum(1) - 1) ** 2, [1.1, 0.1],
        CUTE.format("MARATOSB")),
    _minimiser("hairy", lambda x: 30 * ((7 * x[:, 0]).sin() * (7 * x[:, 1]).cos()) ** 2
        + 100 * ((0.01 + (x[:, 0] - x[:, 1]) ** 2).sqrt() + (0.01 + x[:, 0] ** 2).sqrt()), [-5.0, -7.0],
        CUTE.format("HAIRY")),
    _minimiser("denschnd", squares(of(lambda a, b, c: [a * a + b**3 - c**4, 2 * a * b * c,
        2 * a * b - 3 * b * c + a * c])), 3 * [10.0], CUTE.format("DENSCHND")),
    _minimiser("fletchcr_40", chained(lambda a, b: 100 * (b - a + 1 - a * a) ** 2, 2), 40 * [0.0],
        CUTE.format("FLETCHCR")),
    _minimiser("genrose_50", chained(lambda a, b: 100 * (b - a * a) ** 2 + (b - 1) ** 2, 2), even(50),
        CUTE.format("GENROSE")),
    _minimiser("woods_48", blocks(squares(of(lambda a, b, c, d: [10 * (b - a * a), 1 - a,
        90**0.5 * (d - c * c), 1 - c, 10**0.5 * (b + d - 2), (b - d) / 10**0.5])), 4, 12), 24 * [-3.0, -1.0],
        CUTE.format("WOODS"), 48 * [1.0]),
    _minimiser("chained_rosenbrock_20", rosenbrock_chain, 10 * [-1.2, 1.0],
        CUTE.format("CHNROSNB, equal weights"), 20 * [1.0]),
    _minimiser("chained_powell_20", chained_powell, 5 * [3.0, -1.0, 0.0, 1.0],
        "Lukšan and Vlček (1999), problem 3", 20 * [0.0]),
    _minimiser("genrose_10", chained(lambda a, b: 100 * (b - a * a) ** 2 + (b - 1) ** 2, 2), even(10),
        CUTE.format("GENROSE")),
    _minimiser("freuroth_10", chained(lambda a, b: (a + ((5 - b) * b - 2) * b - 13) ** 2
        + (a + ((b + 1) * b - 14) * b - 29) ** 2, 2), [0.5, -2.0] + 8 * [0.0], CUTE.format("FREUROTH")),
    _minimiser("dqdrtic_12", chained(lambda a, b, c: a * a + 100 * b * b + 100 * c * c, 3), 12 * [3.0],
        CUTE.format("DQDRTIC"), 12 * [0.0]),
    _minimiser("arwhead_20", lambda x: ((x[:, :-1] ** 2 + x[:, -1:] ** 2) ** 2 - 4 * x[:, :-1] + 3).sum(1),
        20 * [1.0], CUTE.format("ARWHEAD"), 19 * [1.0] + [0.0]),
    _minimiser("nondia_20", lambda x: (x[:, 0] - 1) ** 2 + 100 * ((x[:, :1] - x[:, :-1] ** 2) ** 2).sum(1),
        20 * [-1.0], CUTE.format("NONDIA")),
    _minimiser("liarwhd_20", lambda x: (4 * (x * x - x[:, :1]) ** 2 + (x - 1) ** 2).sum(1), 20 * [4.0],
        CUTE.format("LIARWHD"), 20 * [1.0]),
    _minimiser("tridia_20", lambda x: (x[:, 0] - 1) ** 2
        + (counted(x, 19, first=2) * (2 * x[:, 1:] - x[:, :-1]) ** 2).sum(1), 20 * [1.0],
        CUTE.format("TRIDIA"), [2.0**-i for i in range(20)]),
    _minimiser("power_10", lambda x: (counted(x, 10) * x * x).sum(1) ** 2, 10 * [1.0], CUTE.format("POWER"),
        10 * [0.0]),
    _minimiser("quartc_10", indexed(lambda x, i: (x - i) ** 4), 10 * [2.0], CUTE.format("QUARTC"),
        [float(i) for i in range(1, 11)]),
    _minimiser("edensch_20", chained(lambda a, b: (a - 2) ** 4 + (a * b - 2 * b) ** 2 + (b + 1) ** 2, 2),
        20 * [8.0], CUTE.format("EDENSCH")),
    _minimiser("engval1_20", chained(lambda a, b: (a * a + b * b) ** 2 - 4 * a + 3, 2), 20 * [2.0],
        CUTE.format("ENGVAL1")),
    _minimiser("engval2", squares(of(lambda a, b, c: [a * a + b * b + c * c - 1,
        a * a + b * b + (c - 2) ** 2 - 1, a + b + c - 1, a + b - c + 1,
        3 * b * b + a**3 + (5 * c - a + 1) ** 2 - 36])), [1.0, 2.0, 0.0],
        CUTE.format("ENGVAL2"), [0.0, 0.0, 1.0]),
    _minimiser("dixmaana_15", dixmaana, 15 * [2.0], CUTE.format("DIXMAANA"), 15 * [0.0]),
    _minimiser("bdqrtic_20", bdqrtic, 20 * [1.0], CUTE.format("BDQRTIC")),
    _minimiser("cragglvy_10", cragglvy, [1.0] + 9 * [2.0], CUTE.format("CRAGGLVY")),
    _minimiser("cliff", lambda x: (x[:, 0] / 100 - 0.03) ** 2 - x[:, 0] + x[:, 1]
        + torch.exp(20 * (x[:, 0] - x[:, 1])), [0.0, -1.0], CUTE.format("CLIFF")),
    _minimiser("cube", squares(of(lambda a, b: [a - 1, 10 * (b - a**3)])), [-1.2, 1.0], CUTE.format("CUBE"),
        [1.0, 1.0]),
    _minimiser("denschna", squares(of(lambda a, b: [a * a, a + b, torch.expm1(b)])), [1.0, 1.0],
        CUTE.format("DENSCHNA"), [0.0, 0.0]),
    _minimiser("denschnb", squares(of(lambda a, b: [a - 2, (a - 2) * b, b + 1])), [1.0, 1.0],
        CUTE.format("DENSCHNB"), [2.0, -1.0]),
    _minimiser("denschnc", squares(of(lambda a, b: [a * a + b * b - 2, (a - 1).exp() + b**3 - 2])),
        [2.0, 3.0], CUTE.format("DENSCHNC"), [1.0, 1.0]),
    _minimiser("denschne", squares(of(lambda a, b, c: [a, b + b * b, torch.expm1(c)])), [2.0, 3.0, -8.0],
        CUTE.format("DENSCHNE")),
    _minimiser("denschnf", squares(of(lambda a, b: [2 * (a + b) ** 2 + (a - b) ** 2 - 8,
        5 * a * a + (b - 3) ** 2 - 9])), [2.0, 0.0], CUTE.format("DENSCHNF"), [1.0, 1.0]),
    _minimiser("himmelbg", lambda x: torch.exp(-x.sum(1)) * (2 * x[:, 0] ** 2 + 3 * x[:, 1] ** 2), [0.5, 0.5],
        CUTE.format("HIMMELBG"), [0.0, 0.0]),
    _minimiser("himmelbh", lambda x: x[:, 0] ** 3 + x[:, 1] ** 2 - 3 * x[:, 0] - 2 * x[:, 1] + 2, [0.0, 2.0],
        CUTE.format("HIMMELBH"), [1.0, 1.0]),
    _minimiser("sisser", lambda x: 3 * x[:, 0] ** 4 - 2 * (x[:, 0] * x[:, 1]) ** 2 + 3 * x[:, 1] ** 4,
        [1.0, 0.1], CUTE.format("SISSER"), [0.0, 0.0]),
    _minimiser("zangwil2", lambda x: (16 * (x * x).sum(1) - 8 * x[:, 0] * x[:, 1] - 56 * x[:, 0]
        - 256 * x[:, 1] + 991) / 15, [3.0, 8.0], CUTE.format("ZANGWIL2"), [4.0, 9.0]),
    _minimiser("sineval", squares(of(lambda a, b: [100 * (b - a.sin()), a / 2])), [4.712389, -1.0],
        CUTE.format("SINEVAL"), [0.0, 0.0]),
    _minimiser("s308", squares(of(lambda a, b: [a * a + a * b + b * b, a.sin(), b.cos()])), [3.0, 0.1],
        CUTE.format("S308")),
    _minimiser("cosine_20", chained(lambda a, b: torch.cos(a * a - b / 2), 2), 20 * [1.0],
        CUTE.format("COSINE")),
    _minimiser("hilberta_5", lambda x: (x * (x @ (1 / (numbers(5)[:, None] + numbers(5) - 1)))).sum(1),
        5 * [-3.0], CUTE.format("HILBERTA"), 5 * [0.0]),
]  # fmt: skip


def starts(problem: Collected) -> Tensor:
    """The published start and perturbed ones, (8, n) for a system and (4, n) for a minimiser."""
    count = STARTS[problem.kind]
    noise = torch.randn(
        count, len(problem.start), generator=torch.Generator().manual_seed(0), dtype=F64
    )
    noise[0] = 0
    return problem.z0 + 0.05 * (problem.z0.abs() + 0.1) * noise


def solve(problem: Collected, *, default: bool = False, budget: int = BUDGET) -> solvers.Solution:
    """``root``, or the default of ``fixed_point`` on ``z - F``; L-BFGS for a minimiser."""
    z0 = starts(problem)
    options: Any = {"max_steps": budget, "adjoint": None, "on_failure": "ignore"}
    if problem.kind == "minimiser":
        options["tolerance"] = solvers.Tolerance(0.0, GRADIENT)
        descent = solvers.Descent(problem.function)
        return solvers.fixed_point(descent, z0, solver=solvers.LBFGS(), **options)
    options["tolerance"] = solvers.Tolerance(0.0, ROOT)
    if default:
        return solvers.fixed_point(problem.f, z0, **options)
    return solvers.root(problem.function, z0, **options)


def solved(problem: Collected, z: Tensor, slack: float = 1.0) -> Tensor:
    """Whether each row of z (B, n) meets the criterion of its kind, recomputed here; (B,) bool."""
    if problem.kind == "system":
        return problem.function(z).norm(dim=1) <= slack * ROOT
    gradient = (z - problem.f(z)).norm(dim=1)
    return gradient <= slack * GRADIENT * problem.function(z).abs().clamp_min(1)

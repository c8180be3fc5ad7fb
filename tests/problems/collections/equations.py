"""The equations f_i of Moré, Garbow and Hillstrom (MGH) whose sum of squares is to be minimised.

Each takes x (B, n) to f (B, m), row by row, in the numbers of ACM Trans. Math. Softw. 7 (1981) 17.
"""

from __future__ import annotations

import torch
from torch import Tensor

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

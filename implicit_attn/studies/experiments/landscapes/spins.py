"""Spins on spheres in pictures: the mean against the field, and coupled spins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_attn.studies.tables import Table
from solvers.core.checks import require_count, require_positive


def bessel_ratio(order: float, x: Tensor) -> Tensor:
    """``I_{order+1}(x) / I_order(x)`` of modified Bessel functions, to rounding.

    The recurrence ``1 / r_n = 2 (n + 1) / x + r_{n+1}`` from far above downwards: it neither over- nor
    underflows where the functions themselves do.

    Args:
        order: >= 0.
        x: floating, >= 0.

    Source: Amos (1974), https://doi.org/10.1090/S0025-5718-1974-0333287-7.
    """
    if not order >= 0:
        raise ValueError(f"order must be >= 0, got {order!r}")
    terms = 64 + math.ceil(8 * math.sqrt(x.max().item()))  # 1e-14 of the start is left
    top = order + terms
    ratio = x / (top + (top**2 + x.square()).sqrt())
    for k in range(terms - 1, -1, -1):
        ratio = x / (2 * (order + k + 1) + x * ratio)
    return ratio


def large_order_ratio(order: float, x: Tensor) -> Tensor:
    """The limit of that ratio for large orders, ``u / (1 + sqrt(1 + u^2))`` at ``u = x / order``."""
    u = x / require_positive("order", order)
    return u / (1 + (1 + u.square()).sqrt())


def bessel_table(orders: Sequence[int]) -> Table:
    """The ratio, its limit and the relative error, at ``x = sqrt(nu), nu, nu^2`` for each order nu."""
    table: Table = []
    for order in orders:
        places = {"sqrt(nu)": order**0.5, "nu": float(order), "nu^2": float(order) ** 2}
        x = torch.tensor(list(places.values()), dtype=torch.float64)
        exact, limit = bessel_ratio(order, x), large_order_ratio(order, x)
        for name, *numbers in zip(places, x.tolist(), exact.tolist(), limit.tolist(), strict=True):
            value, ratio, approximation = numbers
            error = approximation / ratio - 1
            row = {"order": order, "at": name, "x": value, "ratio": ratio}
            table.append(row | {"limit": approximation, "relative_error": error})
    return table


def norm_curves(betas: Sequence[float], *, dim: int, points: int = 81) -> Table:
    """``|<S>|`` of a spin of radius ``R = sqrt(d/2 - 1)`` in a field ``beta h``, ``|h|`` from 0 to 40.

    ``exact``: ``R I_{nu+1}(R beta |h|) / I_nu(R beta |h|)``, ``nu = d/2 - 1``. ``norm``: its limit for
    large d, ``|phi|`` for ``phi(h) = beta h / (1 + sqrt(1 + beta^2 |h|^2 / R^2))``.

    Raises:
        ValueError: for ``dim`` < 3, which has no such radius, or ``points`` < 2.
    """
    order = require_count("dim", dim, low=3) / 2 - 1
    radius = math.sqrt(order)
    fields = torch.linspace(0, 40, require_count("points", points, low=2), dtype=torch.float64)
    table: Table = []
    for beta in betas:
        x = radius * require_positive("betas", beta) * fields
        norms = radius * large_order_ratio(order, x), radius * bessel_ratio(order, x)
        for field, norm, exact in zip(fields.tolist(), *(t.tolist() for t in norms), strict=True):
            table.append({"beta": beta, "field": field, "norm": norm, "exact": exact})
    return table


class SpinPicture(NamedTuple):
    """A few planar spins: their couplings (N, N), fields (N, 2) and means (N, 2)."""

    couplings: Tensor
    fields: Tensor
    means: Tensor


def planar_spins(count: int = 7, *, strength: float = 1.0, seed: int = 0) -> SpinPicture:
    """Unit spins in the plane with symmetric couplings ~ N(0, strength^2 / N) in fields ~ N(0, I / 4).

    The means are those of naive mean field, ``m_i = r(|h_i|) h_i / |h_i|``, ``h_i = x_i + sum_j J_ij m_j``,
    ``r = I_1 / I_0``, after 500 damped steps.
    """
    generator = torch.Generator().manual_seed(seed)
    require_count("count", count, low=2)
    scale = require_positive("strength", strength) / math.sqrt(count)
    raw = torch.randn(count, count, generator=generator, dtype=torch.float64) * scale
    couplings = raw.triu(1) + raw.triu(1).T
    fields = 0.5 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    means = torch.zeros_like(fields)
    for _ in range(500):
        local = fields + couplings @ means
        size = local.norm(dim=1, keepdim=True)
        # I_1 / I_0 from exponentially scaled functions, which do not overflow.
        ratio = torch.special.i1e(size) / torch.special.i0e(size)
        means = torch.lerp(means, ratio * local / size, 0.5)
    return SpinPicture(couplings, fields, means)


def directed_couplings(sites: int = 64, *, seed: int = 0) -> Tensor:
    """``J`` (N, N) ~ N(0, 1 / N), of every ordered pair its own, without a diagonal."""
    generator = torch.Generator().manual_seed(seed)
    require_count("sites", sites, low=2)
    couplings = torch.randn(sites, sites, generator=generator, dtype=torch.float64) / sites**0.5
    return couplings.fill_diagonal_(0.0)


def strongest(couplings: Tensor, share: float) -> Table:
    """The ``share`` of pairs with the largest ``|J_ij|``, weakest first; once a pair where symmetric."""
    matrix = couplings.triu() if torch.equal(couplings, couplings.T) else couplings
    rows, columns = matrix.nonzero(as_tuple=True)
    order = matrix[rows, columns].abs().argsort()
    order = order[len(order) - math.ceil(share * len(order)) :]
    return [
        {"to": i, "from": j, "coupling": matrix[i, j].item()}
        for i, j in zip(rows[order].tolist(), columns[order].tolist(), strict=True)
    ]

r"""The saddle point of O(d) spins as functions of one or two multipliers, and over the temperature.

Units of the source: ``K = 2 beta J``, ``x = beta sqrt d h`` with ``|h_i| = 1``, ``Lambda = 2 beta t``, and ::

    phi(t) = beta sum_i t_i - 1/2 log det(t - J) + beta/4 h^T (t - J)^-1 h

The free energy is ``-(phi - N/2 (1 + log 2 beta)) / beta`` at the minimum, for each of the d components.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import solvers
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.tables import Table

F64 = torch.float64


@dataclass(frozen=True)
class SaddleModel:
    """Couplings J (N, N) ~ N(0, 1/(N d)) and fields h (N, d), unit vectors, float64."""

    couplings: Tensor
    field: Tensor

    @classmethod
    def drawn(cls, sites: int, dim: int, generator: torch.Generator) -> SaddleModel:
        upper = torch.randn(sites, sites, generator=generator, dtype=F64).triu(1)
        field = torch.randn(sites, dim, generator=generator, dtype=F64)
        couplings = (upper + upper.mT) / math.sqrt(sites * dim)
        return cls(couplings, F.layer_norm(field, (dim,), eps=0.0) / math.sqrt(dim))

    @property
    def levels(self) -> Tensor:
        """Eigenvalues of J, ascending: ``t - J`` is positive definite right of the last."""
        return torch.linalg.eigvalsh(self.couplings)

    def solve(self, beta: float, *, per_site: bool) -> Any:
        """The :class:`solvers.SaddleSolution`."""
        field = beta * math.sqrt(self.field.shape[1]) * self.field
        return solvers.spherical_saddle(
            2 * beta * self.couplings, field.unsqueeze(0), per_site=per_site
        )


def curves(model: SaddleModel, beta: float, multipliers: Tensor) -> Table:
    """``phi``, ``phi'`` and ``phi''`` per site for one multiplier t, also left of the border.

    There the formulas go on with ``log |det|``, and ``phi'`` may have roots that are no solutions.
    """
    levels, basis = torch.linalg.eigh(model.couplings)
    weight = (basis.mT @ model.field).square().sum(1)
    gap = multipliers.unsqueeze(1) - levels
    sites = len(levels)
    phi = beta * multipliers + (-gap.abs().log() / 2 + beta / 4 * weight / gap).sum(1) / sites
    slope = beta - (0.5 / gap + beta / 4 * weight / gap**2).sum(1) / sites
    curvature = (0.5 / gap**2 + beta / 2 * weight / gap**3).sum(1) / sites
    columns = zip(multipliers, phi, slope, curvature, strict=True)
    names = ("t", "phi", "slope", "curvature")
    return [dict(zip(names, (v.item() for v in row), strict=True)) for row in columns]


def sweep(
    model: SaddleModel, betas: list[float], advance: Advance = lambda what: None
) -> tuple[Table, int]:
    """A row for each inverse temperature, and how many samples did not converge.

    Columns: ``beta``; ``root``, the one multiplier t of all spins; ``smallest`` and ``largest`` of one
    multiplier for each spin; ``free_energy`` per site and component, with one for each; ``length``, the mean
    ``|<S_i>| / sqrt d``.
    """
    sites, dim = model.field.shape
    table, failed = [], 0
    for index, beta in enumerate(betas):
        if index % 10 == 0:
            advance(f"beta = {beta:.2g}")
        shared = model.solve(beta, per_site=False)
        own = model.solve(beta, per_site=True)
        failed += int((~shared.converged).sum() + (~own.converged).sum())
        multipliers = own.multiplier / (2 * beta)
        table.append(
            {
                "beta": beta,
                "root": shared.multiplier.item() / (2 * beta),
                "smallest": multipliers.min().item(),
                "largest": multipliers.max().item(),
                "free_energy": -own.log_partition.item() / (beta * sites * dim),
                "length": own.mean.norm(dim=-1).mean().item() / math.sqrt(dim),
            }
        )
    return table, failed


def plane(model: SaddleModel, beta: float, values: Tensor) -> Tensor:
    """``phi(t_1, t_2)`` of two spins on a grid, (len, len) by t_2 and t_1; NaN outside of the domain."""
    first, second = torch.meshgrid(values, values, indexing="xy")
    multipliers = torch.stack([first, second], dim=-1).reshape(-1, 2)
    factor, failed = torch.linalg.cholesky_ex(torch.diag_embed(multipliers) - model.couplings)
    half = torch.linalg.solve_triangular(
        factor, model.field.expand(len(factor), -1, -1), upper=False
    )
    log_det = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
    phi = beta * multipliers.sum(1) - log_det / 2 + beta / 4 * half.square().sum((1, 2))
    return torch.where(failed == 0, phi, torch.nan).view(len(values), len(values))

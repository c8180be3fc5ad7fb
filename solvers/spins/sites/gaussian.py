"""Gaussian sites, for which adaptive TAP is exact."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from solvers.core.modes import without_autocast
from solvers.spins.inputs import as_wide
from solvers.spins.sites.site import Site


class GaussianSite(Site):
    r"""``S ~ N(0, Sigma)``::

        covariance = (Sigma^-1 - V)^-1,   mean = covariance h,
        log Z = 1/2 h^T covariance h - 1/2 log det(I - Sigma V)

    The results are NaN where ``Sigma^-1 - V`` is not positive definite. The covariance is computed
    as ``A (I - A^T V A)^-1 A^T`` with ``Sigma = A A^T``.

    Args:
        covariance: ``Sigma``, (d, d) or (N, d, d), symmetric positive definite. A ``nn.Parameter`` is
            registered as one, another tensor as a buffer; gradients reach both.

    Raises:
        TypeError, ValueError: for another shape or dtype, or a matrix that is not a covariance.
    """

    field_dependent: ClassVar[bool] = False
    sigma: Tensor

    def __init__(self, covariance: Tensor) -> None:
        super().__init__()
        _check_covariance(covariance)
        if isinstance(covariance, nn.Parameter):
            self.sigma = covariance
        else:
            self.register_buffer("sigma", covariance)

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        half, factor = self._factors(field, variance)
        inner = torch.linalg.solve_triangular(factor, half.mT @ field.unsqueeze(-1), upper=False)
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return inner.square().sum((-2, -1)) / 2 - log_det

    def mean(self, field: Tensor, variance: Tensor) -> Tensor:
        return self.moments(field, variance)[0]

    def covariance(self, field: Tensor, variance: Tensor) -> Tensor:
        half, factor = self._factors(field, variance)
        rows = torch.linalg.solve_triangular(factor, half.mT.expand_as(factor), upper=False)
        return rows.mT @ rows

    def moments(self, field: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        covariance = self.covariance(field, variance)
        return (covariance @ field.unsqueeze(-1)).squeeze(-1), covariance

    @torch.no_grad()
    def sample(
        self,
        field: Tensor,
        generator: torch.Generator | None = None,
        variance: Tensor | None = None,
    ) -> Tensor:
        """``mean + A (I - A^T V A)^-T/2 e``, e standard normal; NaN where the site does not exist."""
        with without_autocast(field.device.type):
            h = as_wide(field)
            drawn = torch.randn(h.shape, generator=generator, dtype=h.dtype, device=h.device)
            zero = h.new_zeros(h.shape[-2], h.shape[-1], h.shape[-1])
            half, factor = self._factors(h, zero if variance is None else as_wide(variance))
            inner, drawn = half.mT @ h.unsqueeze(-1), drawn.unsqueeze(-1)
            if variance is None:
                inner = inner + drawn
            else:  # the covariance is A F^-T F^-1 A^T with F F^T = I - A^T V A
                inner = torch.linalg.solve_triangular(factor, inner, upper=False) + drawn
                inner = torch.linalg.solve_triangular(factor.mT, inner, upper=True)
            return (half @ inner).squeeze(-1).to(field.dtype)

    def at(self, index: int) -> GaussianSite:
        """The Gaussian of site ``index`` alone."""
        return self if self.sigma.dim() == 2 else GaussianSite(self.sigma[index].detach())

    def _factors(self, field: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """``A`` and the Cholesky factor of ``I - A^T V A``, NaN where that is indefinite."""
        sigma, (sites, dim) = self.sigma.to(field.dtype), field.shape[-2:]
        if sigma.shape[-1] != dim or (sigma.dim() == 3 and len(sigma) != sites):
            raise ValueError(
                f"covariance {tuple(sigma.shape)} does not fit sites (N, d) = {(sites, dim)}"
            )
        half, _ = torch.linalg.cholesky_ex(sigma)
        unit = torch.eye(sigma.shape[-1], dtype=sigma.dtype, device=sigma.device)
        factor, failed = torch.linalg.cholesky_ex(unit - half.mT @ variance @ half)
        return half, torch.where((failed == 0)[..., None, None], factor, torch.nan)

    def extra_repr(self) -> str:
        return f"covariance={tuple(self.sigma.shape)}"


def _check_covariance(covariance: object) -> None:
    if not isinstance(covariance, Tensor):
        raise TypeError(f"covariance must be a tensor (d, d) or (N, d, d), got {type(covariance)}")
    if not covariance.is_floating_point():
        raise TypeError(f"covariance must be of a floating dtype, got {covariance.dtype}")
    if covariance.dim() not in (2, 3) or covariance.shape[-1] != covariance.shape[-2]:
        raise ValueError(
            f"covariance must have the shape (d, d) or (N, d, d), got {tuple(covariance.shape)}"
        )
    matrix = covariance.detach()
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    allowed = 32 * torch.finfo(covariance.dtype).eps * matrix.abs().max()
    if not bool((matrix - matrix.mT).abs().max() <= allowed):
        raise ValueError("covariance must be symmetric and finite")
    if bool(torch.linalg.cholesky_ex(matrix)[1].any()):
        raise ValueError("covariance must be positive definite, got a matrix that is not")

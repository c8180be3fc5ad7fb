"""Sites on a sphere."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from solvers.core.checks import require_flag, require_positive
from solvers.core.modes import without_autocast
from solvers.spins.inputs import as_wide
from solvers.spins.sites.bingham import LogPartition, Moments, eigen, saddle_point
from solvers.spins.sites.directions import draw_directions
from solvers.spins.sites.site import Site

ROUNDED = 0.01  # share of its length by which a given spin may miss the sphere


class SphericalSite(Site):
    r"""``|S| = radius``, uniform on the sphere in d dimensions.

    For V = 0, with ``t = radius |h|``::

        mean = radius I_{d/2}(t) / I_{d/2-1}(t) h / |h|

    An isotropic V drops out. Any other V makes this a Fisher-Bingham distribution. Its integral over
    the Lagrange multiplier of the constraint is computed by a quadrature on a contour through the
    saddle point (:mod:`solvers.spins.sites.bingham`), which is stable for fields of any strength and in
    any dimension. It costs one eigendecomposition of V per site.

    With ``large_dimension`` the integral is replaced by its saddle point: ``mean = X h``,
    ``X = (lambda - V)^-1``, ``lambda`` from ``tr X + |X h|^2 = radius^2``. For V = 0 and radius
    ``sqrt d`` this is ``mean = 2 h / (1 + sqrt(1 + 4 |h|^2 / d))``; the relative error is O(1/d).

    Args:
        radius: > 0; None: ``sqrt d``.
        large_dimension: use the saddle point.

    ``log_partition`` is 0 at ``h = 0, V = 0``.

    Source: Mardia and Jupp (2000), "Directional Statistics", section 9.3,
    https://doi.org/10.1002/9780470316979; Bal (2021), "Deep Implicit Attention", for large d.
    """

    values: ClassVar[str] = "of length radius (None: sqrt d)"

    def __init__(self, radius: float | None = None, *, large_dimension: bool = False) -> None:
        super().__init__()
        if radius is not None:
            require_positive("radius", radius)
        self.radius = radius
        self.large_dimension = require_flag("large_dimension", large_dimension)

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        rho, origin = self._rho(field), torch.zeros_like(field)
        if self.large_dimension:
            at_zero = _saddle(origin, torch.zeros_like(variance), rho)[0]
            return _saddle(field, variance, rho)[0] - at_zero
        value = LogPartition.apply(field, _unless_zero(variance), rho)
        return value - LogPartition.apply(origin, None, rho)

    def mean(self, field: Tensor, variance: Tensor) -> Tensor:
        return self.moments(field, variance)[0]

    def moments(self, field: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        if self.large_dimension:
            return _saddle(field, variance, self._rho(field))[1:]
        return Moments.apply(field, _unless_zero(variance), self._rho(field))

    @torch.no_grad()
    def sample(
        self,
        field: Tensor,
        generator: torch.Generator | None = None,
        variance: Tensor | None = None,
    ) -> Tensor:
        """A draw from the sphere itself (also with ``large_dimension``), by Wood's rejection.

        Raises:
            NotImplementedError: for a V that is not zero.

        Source: Wood (1994), "Simulation of the von Mises Fisher distribution",
        https://doi.org/10.1080/03610919408813161.
        """
        if variance is not None and bool(variance.any()):
            raise NotImplementedError(
                "SphericalSite draws samples at variance 0 only (von Mises and Fisher), got a variance "
                "that is not zero"
            )
        radius = math.sqrt(self._rho(field))
        with without_autocast(field.device.type):
            flat = as_wide(field).reshape(-1, field.shape[-1])
            drawn = radius * draw_directions(radius * flat, generator)
        return drawn.view_as(field).to(field.dtype)

    def takes(self, states: Tensor) -> Tensor:
        """Of the length ``radius``, up to 1 %, as after rounding to half precision."""
        radius = math.sqrt(self._rho(states))
        return (states.norm(dim=-1) - radius).abs() <= ROUNDED * radius

    def _rho(self, field: Tensor) -> float:
        """``radius^2``."""
        dim = field.shape[-1]
        if dim < 2:
            raise ValueError(f"SphericalSite needs d >= 2, got d = {dim}; use IsingSite")
        return float(dim) if self.radius is None else float(self.radius) ** 2

    def extra_repr(self) -> str:
        return f"radius={self.radius}, large_dimension={self.large_dimension}"


def _unless_zero(variance: Tensor) -> Tensor | None:
    """None for a V of zeros that needs no gradient: no eigendecomposition then."""
    if variance.requires_grad or variance.device.type != "cpu" or bool(variance.any()):
        return variance
    return None


def _saddle(field: Tensor, variance: Tensor, rho: float) -> tuple[Tensor, Tensor, Tensor]:
    """log Z up to a constant, mean and covariance at the saddle point ``lambda``.

    ``covariance = X - 2 (X^2 h)(X^2 h)^T / (tr X^2 + 2 h^T X^3 h)``, as lambda moves with h.
    """
    with torch.no_grad():
        eigenvalues, basis = eigen(variance)
        squared = (basis.mT @ field.unsqueeze(-1)).squeeze(-1).square() / 4
        levels = eigenvalues / 2
        gap = saddle_point(levels.expand_as(squared), squared, rho)
        multiplier = 2 * (levels.amax(-1) + gap.amin(-1))
    if torch.is_grad_enabled():
        for _ in range(2):  # Newton steps at the solution carry its derivatives, one order each
            _, spread, mean, _, slope = _at(multiplier, field, variance)
            size = spread.diagonal(dim1=-2, dim2=-1).sum(-1) + mean.square().sum(-1)
            multiplier = multiplier + (size - rho) / slope
    factor, spread, mean, twice, slope = _at(multiplier, field, variance)
    log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    value = rho * multiplier / 2 - log_det + (field * mean).sum(-1) / 2
    ratio = (2 / slope)[..., None, None]
    return value, mean, spread - ratio * twice.unsqueeze(-1) * twice.unsqueeze(-2)


def _at(multiplier: Tensor, field: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    """Cholesky factor of ``lambda - V``, ``X``, ``X h``, ``X^2 h`` and ``tr X^2 + 2 h^T X^3 h``."""
    unit = torch.eye(field.shape[-1], dtype=field.dtype, device=field.device)
    factor, _ = torch.linalg.cholesky_ex(multiplier[..., None, None] * unit - variance)
    spread = torch.cholesky_inverse(factor)
    mean = (spread @ field.unsqueeze(-1)).squeeze(-1)
    twice = (spread @ mean.unsqueeze(-1)).squeeze(-1)
    return factor, spread, mean, twice, spread.square().sum((-2, -1)) + 2 * (mean * twice).sum(-1)

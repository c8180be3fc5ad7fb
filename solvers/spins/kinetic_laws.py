r"""Single sites as the closures of :mod:`solvers.spins.kinetic` need them.

A closure knows the mean of a site at the time before, not its field. A law gives the covariance as a
function of the mean, and the mean over a field with Gaussian noise.

On a sphere of radius R in d dimensions, for large d, with ``q = sqrt(d^2 + 4 R^2 |h|^2)``::

    m = a h,   a = 2 R^2 / (d + q) = (R^2 - |m|^2) / d,   C = a I - (2 / q) m m^T,
    C^-1 u = u / a + 2 m (m.u) / (a^2 d),
    T:A = (8 / q^2 + 8 R^2 / (a q^3)) (m^T A m) m - (2 a / q) (tr(A) m + 2 A m)

T is the third cumulant. All of it is a function of the mean alone, as ``q = 2 R^2 / a - d``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from solvers.core.device import maybe_any
from solvers.spins.sites import GaussianSite, IsingSite, PottsSite, Site, SphericalSite
from solvers.spins.theories import no_variance

# Trapezoidal rules of the Gaussian average. Over the noise: for tanh, whose poles lie at i pi / 2, the
# error is exp(-pi^2 / (STEP s)) in noise of standard deviation s, and exp(-REACH^2 / 2) from the cut,
# so that it is for s <= WIDE only. For wider noise the integral by parts, over the spin's own width:
# exp(-pi^2 / STEP) times exp(pi^2 / (8 s^2)), and rounding from the cut.
STEP, REACH, WIDE = 0.25, 8.0, 1.0


class Law:
    """Any site: its mean without noise, which is all that the naive closure needs."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def mean(self, field: Tensor) -> Tensor:
        """(B, N, d) -> (B, N, d), without reaction."""
        return self.site.mean(field, no_variance(field))

    def covariance(self, mean: Tensor) -> Tensor:
        """The covariance (B, N, d, d) of a site that has this mean (B, N, d)."""
        raise self._unknown("the covariance as a function of the mean", "naive")

    def scatter(self, mean: Tensor) -> Tensor:
        """The trace (B, N, 1) of the covariance."""
        return self.covariance(mean).diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)

    def averaged(self, field: Tensor, noise: Tensor) -> Tensor:
        """The mean over fields ``h + e``, e Gaussian with covariance of trace ``noise`` (B, N, 1)."""
        raise self._unknown("the average over a noisy field", "tap")

    def _unknown(self, what: str, instead: str) -> ValueError:
        return ValueError(
            f"closure must be {instead!r} for {type(self.site).__name__}: {what} is not known"
        )


class IsingLaw(Law):
    """``C = 1 - m^2``; the average by quadrature, ``int tanh(h + s u) N(u; 0, 1) du`` in weak noise,
    by parts ``1/2 int sech^2(v) erf((h - v) / (s sqrt 2)) dv`` in strong, ``s^2 = noise``."""

    def covariance(self, mean: Tensor) -> Tensor:
        return self.scatter(mean).unsqueeze(-1)

    def scatter(self, mean: Tensor) -> Tensor:
        return (1 - mean.square()).clamp_min(0.0)

    def averaged(self, field: Tensor, noise: Tensor) -> Tensor:
        # The root has no derivative at 0; a noise of the size of rounding changes nothing else.
        width = (noise + torch.finfo(noise.dtype).eps).sqrt()
        wide = width > WIDE
        # Each rule sees widths of its own only: what is not chosen must not have NaN gradients.
        mean = _over_noise(field, width.clamp_max(WIDE))
        if not maybe_any(wide):
            return mean
        return torch.where(wide, _by_parts(field, width.clamp_min(WIDE)), mean)


def _over_noise(field: Tensor, width: Tensor) -> Tensor:
    nodes = torch.arange(-REACH, REACH + STEP, STEP, dtype=field.dtype, device=field.device)
    weights = torch.exp(-nodes.square() / 2) * (STEP / math.sqrt(2 * math.pi))
    return torch.tanh(field.unsqueeze(-1) + width.unsqueeze(-1) * nodes) @ weights


def _by_parts(field: Tensor, width: Tensor) -> Tensor:
    count = math.ceil((2 - math.log(torch.finfo(field.dtype).eps) / 2) / STEP)
    nodes = STEP * torch.arange(-count, count + 1, dtype=field.dtype, device=field.device)
    weights = STEP / 2 / torch.cosh(nodes).square()
    return torch.erf((field.unsqueeze(-1) - nodes) / (math.sqrt(2) * width.unsqueeze(-1))) @ weights


class PottsLaw(Law):
    """``C = diag(m) - m m^T``."""

    def covariance(self, mean: Tensor) -> Tensor:
        return torch.diag_embed(mean) - mean.unsqueeze(-1) * mean.unsqueeze(-2)


class GaussianLaw(Law):
    """A constant covariance; noise in a linear response averages out."""

    def covariance(self, mean: Tensor) -> Tensor:
        return self.site.covariance(mean, no_variance(mean)).expand(*mean.shape, mean.shape[-1])

    def averaged(self, field: Tensor, noise: Tensor) -> Tensor:
        return self.mean(field)


LAWS: dict[type[Site], type[Law]] = {
    IsingSite: IsingLaw,
    PottsSite: PottsLaw,
    GaussianSite: GaussianLaw,
}


INVERSION_STEPS = 6  # Newton's for the field of a mean, from the one of large d
INSIDE = 8  # in units of rounding: how far from the sphere a mean is taken to be


class Response(NamedTuple):
    """``a`` and ``q``, (B, N, 1) both."""

    slope: Tensor
    root: Tensor


class LargeSphereLaw(Law):
    """A sphere in many dimensions, in closed form."""

    def __init__(self, site: SphericalSite, dim: int) -> None:
        super().__init__(site)
        if dim < 2:
            raise ValueError(f"SphericalSite needs d >= 2, got d = {dim}; use IsingSite")
        self.dim = dim
        self.squared_radius = float(dim) if site.radius is None else float(site.radius) ** 2

    def mean(self, field: Tensor) -> Tensor:
        return self.slope(field.square().sum(-1, keepdim=True)) * field

    def slope(self, squared_field: Tensor) -> Tensor:
        """``a = |m| / |h|`` (B, N, 1) of ``|h|^2``."""
        rho = self.squared_radius
        return 2 * rho / (self.dim + (self.dim**2 + 4 * rho * squared_field).sqrt())

    def response(self, mean: Tensor) -> Response:
        """At the field that has this mean; a mean outside counts as one at the sphere."""
        slope = self.scatter(mean) / self.dim
        least = INSIDE * torch.finfo(mean.dtype).eps * self.squared_radius / self.dim
        slope = slope.clamp_min(least)
        return Response(slope, 2 * self.squared_radius / slope - self.dim)

    def covariance(self, mean: Tensor) -> Tensor:
        slope, root = self.response(mean)
        unit = torch.eye(self.dim, dtype=mean.dtype, device=mean.device)
        outer = mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return slope.unsqueeze(-1) * unit - (2 / root).unsqueeze(-1) * outer

    def scatter(self, mean: Tensor) -> Tensor:
        """``R^2 - |m|^2``, on every sphere the trace of the covariance; that of C only nearly is."""
        return (self.squared_radius - mean.square().sum(-1, keepdim=True)).clamp_min(0.0)

    def averaged(self, field: Tensor, noise: Tensor) -> Tensor:
        """In many dimensions noise only lengthens the field: ``|h + e|^2 = |h|^2 + noise``."""
        return self.slope(field.square().sum(-1, keepdim=True) + noise) * field

    def reaction(self, distance: Tensor, mean: Tensor, spread: Tensor, product: Tensor) -> Tensor:
        """``1/2 C^-1 T:(v v^T + B)`` of ``v = distance``, with ``spread = tr B`` (B, N, 1) and
        ``product = B m``."""
        slope, root = self.response(mean)
        along = (mean * distance).sum(-1, keepdim=True)
        total = spread + distance.square().sum(-1, keepdim=True)
        vector = product + along * distance  # A m
        inner = (mean * vector).sum(-1, keepdim=True)  # m^T A m
        cubic = 8 / root.square() + 8 * self.squared_radius / (slope * root**3)
        third = cubic * inner * mean - (2 * slope / root) * (total * mean + 2 * vector)
        share = (mean * third).sum(-1, keepdim=True)
        return (third / slope + 2 * share / (slope.square() * self.dim) * mean) / 2


class SphereLaw(LargeSphereLaw):
    """A sphere in any dimension, by the quadrature of its site."""

    def mean(self, field: Tensor) -> Tensor:
        return self.site.mean(field, no_variance(field))

    def slope(self, squared_field: Tensor) -> Tensor:
        tiny = torch.finfo(squared_field.dtype).tiny
        size = squared_field.clamp_min(tiny).sqrt()
        probe = torch.cat([size, size.new_zeros(*size.shape[:-1], self.dim - 1)], dim=-1)
        return self.mean(probe)[..., :1] / size

    def response(self, mean: Tensor) -> Response:
        """By Newton's method along the mean, and ``q`` such that C has the trace ``R^2 - |m|^2``."""
        size = mean.square().sum(-1, keepdim=True)
        rho = self.squared_radius
        with torch.no_grad():
            # |h| / |m|: right at m = 0, and on the sphere, where R^2 - |m|^2 nears (d - 1) R / |h|.
            inside = super().response(mean).slope * self.dim
            ratio = (self.dim - size.clamp_max(rho) / rho) / inside
            for _ in range(INVERSION_STEPS):
                ratio = self._closer(ratio, size)
        if torch.is_grad_enabled():  # a step at the solution carries its derivative
            ratio = self._closer(ratio, size)
        slope = 1 / ratio
        return Response(slope, self._root(slope, size))

    def _closer(self, ratio: Tensor, size: Tensor) -> Tensor:
        slope = self.slope(ratio.square() * size)
        reached = slope * ratio  # |m(h)| / |m|
        step = (1 - reached) / self._stretch(slope, reached.square() * size)
        # A mean within rounding of the sphere hardly tells its field: no step may lead far away.
        return torch.clamp(ratio + step, ratio / 2, 2 * ratio)

    def _stretch(self, slope: Tensor, size: Tensor) -> Tensor:
        """The slope of ``|m|`` in ``|h|``, the variance along m. The others are all ``a`` and sum with
        it to ``R^2 - |m|^2``, a difference that rounding may turn negative; it is never below
        ``a^2 (d - 1) / (2 R^2)``, its limit for strong fields."""
        along = self.squared_radius - size - (self.dim - 1) * slope
        return torch.maximum(along, slope.square() * ((self.dim - 1) / (2 * self.squared_radius)))

    def _root(self, slope: Tensor, size: Tensor) -> Tensor:
        """``q`` with ``a - 2 |m|^2 / q`` the variance along m; where m = 0 that of the limit."""
        excess = slope - self._stretch(slope, size)
        limit = (self.dim + 2) * torch.ones_like(size)
        small = size <= torch.finfo(size.dtype).eps ** 0.5 * self.squared_radius
        return torch.where(small, limit, 2 * size / torch.where(small, 1.0, excess))

r"""Single sites as the closures need them.

A closure knows the mean of a site at the time before, not its field. A law gives the covariance as a
function of the mean, and the mean over a field with Gaussian noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solvers.core.device import maybe_any
from solvers.spins.maps import no_variance
from solvers.spins.sites.discrete import IsingSite, PottsSite
from solvers.spins.sites.gaussian import GaussianSite
from solvers.spins.sites.site import Site

# Trapezoidal rules of the Gaussian average. Over the noise: for tanh, whose poles lie at i pi / 2, the
# error is exp(-pi^2 / (STEP s)) in noise of standard deviation s, and exp(-REACH^2 / 2) from the cut,
# so that it is for s <= WIDE only. For wider noise the integral by parts, over the spin's own width:
# exp(-pi^2 / STEP) times exp(pi^2 / (8 s^2)), and rounding from the cut.
STEP, REACH, WIDE = 0.25, 8.0, 1.0


def trace(matrix: Tensor) -> Tensor:
    """(..., d, d) -> (..., 1)."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)


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

    def fluctuation(self, mean: Tensor) -> Tensor:
        """The covariance of the noise that the site makes, where a law knows it better."""
        return self.covariance(mean)

    def scatter(self, mean: Tensor) -> Tensor:
        """The trace (B, N, 1) of :meth:`fluctuation`."""
        return trace(self.fluctuation(mean))

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

"""Single-site distributions for :func:`solvers.adaptive_tap`."""

from __future__ import annotations

from solvers.sites.base import Site
from solvers.sites.discrete import IsingSite, PottsSite
from solvers.sites.gaussian import GaussianSite
from solvers.sites.spherical import SphericalSite

__all__ = ["GaussianSite", "IsingSite", "PottsSite", "Site", "SphericalSite"]

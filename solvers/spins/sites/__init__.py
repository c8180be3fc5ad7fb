"""Distributions of a single site, for :func:`solvers.adaptive_tap`."""

from __future__ import annotations

from solvers.spins.sites.discrete import IsingSite, PottsSite
from solvers.spins.sites.gaussian import GaussianSite
from solvers.spins.sites.site import Site
from solvers.spins.sites.spherical import SphericalSite
from solvers.spins.sites.torus import TorusSite

__all__ = ["GaussianSite", "IsingSite", "PottsSite", "Site", "SphericalSite", "TorusSite"]

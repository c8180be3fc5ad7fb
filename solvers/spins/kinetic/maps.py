"""One evaluation of a closure: from the means before, and a guess of the means now, to the means now."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from solvers.core.checks import require_choice, require_instance
from solvers.core.modes import without_autocast
from solvers.spins.inputs import as_wide, zero_masked
from solvers.spins.kinetic.couplings import (
    check_network,
    drive,
    noise_matrix,
    noise_strength,
)
from solvers.spins.kinetic.laws import LAWS, Law, trace
from solvers.spins.kinetic.spheres import LargeSphereLaw, SphereLaw
from solvers.spins.sites.discrete import IsingSite, PottsSite
from solvers.spins.sites.site import Site
from solvers.spins.sites.spherical import SphericalSite

CLOSURES = ("naive", "gaussian", "tap", "plefka")
REACTING = ("tap", "plefka")  # the means now act on themselves: an equation, not a formula

Rule = Callable[[Tensor], Tensor]  # (B, N, d) -> (B, N, d)


def kinetic_map(
    mean: Tensor,
    field: Tensor,
    couplings: Tensor,
    *,
    site: Site,
    closure: str = "gaussian",
    mask: Tensor | None = None,
) -> Tensor:
    """The map whose fixed points are the steady states of :func:`kinetic_step`, without inner solves.

    With the closures "naive" and "gaussian" it is the step itself. With "tap" and "plefka" the step is
    an equation for the means after it, ``m(t) = F(m(t), m(t-1))``, and this is ``F(m, m)``. A masked
    site influences no other and keeps its mean.

    Arguments, result and errors: as for :func:`kinetic_step`.
    """
    check_network(mean, field, couplings, mask)
    check_closure(site, closure)
    with without_autocast(mean.device.type):
        wide = as_wide(mean)
        rule = closed(wide, as_wide(field), as_wide(couplings), site, closure, mask)
        after = rule(wide).to(mean.dtype)
    return after if mask is None else torch.where(mask.unsqueeze(-1), after, mean)


def closed(
    mean: Tensor, field: Tensor, couplings: Tensor, site: Site, closure: str, mask: Tensor | None
) -> Rule:
    """``m -> F(m, mean)`` for the means before; with "naive" and "gaussian" it is constant."""
    law = law_of(site, field.shape[-1])
    # What stands at masked sites, NaN for example, takes no part in anything, gradients included.
    mean, field = zero_masked(mean, mask), zero_masked(field, mask)
    theta = field + drive(couplings, mean)
    if closure == "naive":
        return _constant(law.mean(theta))
    if closure == "gaussian":
        return _constant(law.averaged(theta, noise_trace(law, mean, couplings, mask)))
    if closure == "tap" or isinstance(site, IsingSite | PottsSite):
        noise = noise_matrix(couplings, zero_masked(law.covariance(mean), mask))

        def reacted(now: Tensor) -> Tensor:
            return site.mean(theta - (noise @ now.unsqueeze(-1)).squeeze(-1), noise)

        return reacted
    if isinstance(law, LargeSphereLaw):
        return _plefka(law, theta, mean, couplings, mask)
    raise AssertionError(closure)


def law_of(site: Site, dim: int) -> Law:
    """What the closures know of a site; ValueError for spins of a dimension that it cannot have."""
    if isinstance(site, IsingSite) and dim != 1:
        raise ValueError(f"IsingSite takes spins of one component, d = 1, got d = {dim}")
    if isinstance(site, SphericalSite):
        return (LargeSphereLaw if site.large_dimension else SphereLaw)(site, dim)
    found = [law for kind, law in LAWS.items() if isinstance(site, kind)]
    return found[0](site) if found else Law(site)


def noise_trace(law: Law, mean: Tensor, couplings: Tensor, mask: Tensor | None) -> Tensor:
    """``tr B_i`` (B, N, 1), the variance of the field at site i that the spins before make."""
    if couplings.dim() < 4:
        return noise_strength(couplings, zero_masked(law.scatter(mean), mask))
    return trace(noise_matrix(couplings, zero_masked(law.fluctuation(mean), mask)))


def check_closure(site: object, closure: str) -> None:
    """A site and a closure that go together."""
    require_instance("site", site, Site, "a solvers.Site")
    require_choice("closure", closure, CLOSURES)
    large = isinstance(site, SphericalSite) and site.large_dimension
    if closure == "plefka" and not (large or isinstance(site, IsingSite | PottsSite)):
        raise ValueError(
            "closure 'plefka' is for IsingSite, PottsSite and SphericalSite(large_dimension=True), "
            f"got {site}; use closure 'tap'"
        )


def _constant(mean: Tensor) -> Rule:
    return lambda now: mean


def _plefka(
    law: LargeSphereLaw, theta: Tensor, mean: Tensor, couplings: Tensor, mask: Tensor | None
) -> Rule:
    """``h <- theta + 1/2 C^-1 T:(v v^T + B)``, ``v = theta - h``, at the field h of the means now."""
    multiply, spread = _noise_product(law, mean, couplings, mask)

    def reacted(now: Tensor) -> Tensor:
        distance = theta - now / law.response(now).slope
        return law.mean(theta + law.reaction(distance, now, spread, multiply(now)))

    return reacted


def _noise_product(
    law: LargeSphereLaw, mean: Tensor, couplings: Tensor, mask: Tensor | None
) -> tuple[Rule, Tensor]:
    """``m -> B m`` and ``tr B``; where the couplings are numbers, without the matrices ``B_i``."""
    if couplings.dim() == 4:
        matrix = noise_matrix(couplings, zero_masked(law.covariance(mean), mask))
        return lambda now: (matrix @ now.unsqueeze(-1)).squeeze(-1), trace(matrix)
    slope, root = law.response(mean)
    isotropic = noise_strength(couplings, zero_masked(slope, mask))
    outer = 2 / root * mean.square().sum(-1, keepdim=True)
    spread = law.dim * isotropic - noise_strength(couplings, zero_masked(outer, mask))
    pulled, squared = zero_masked(2 / root * mean, mask), couplings.square()

    def multiply(now: Tensor) -> Tensor:
        return isotropic * now - (squared * (now @ mean.mT)) @ pulled

    return multiply, spread

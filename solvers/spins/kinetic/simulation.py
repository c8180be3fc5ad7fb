"""The dynamics of spins in time themselves, by Monte Carlo."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from solvers.core.checks import require_count, require_instance
from solvers.spins.kinetic.couplings import check_finite, check_network, drive
from solvers.spins.sites.site import Site


class GlauberRun(NamedTuple):
    """Averages over chains at every time (steps + 1, N, d), and the last spins (chains, N, d)."""

    means: Tensor
    spins: Tensor


def glauber(
    spins: Tensor,
    field: Tensor,
    couplings: Tensor,
    *,
    steps: int,
    site: Site,
    generator: torch.Generator | None = None,
) -> GlauberRun:
    """Simulate ``steps`` of parallel dynamics in independent chains; no gradients.

    All spins of a chain are drawn at once, from their site's distribution in the field of the spins
    before: ``P(S_i(t)) ~ rho(S_i) exp(S_i.(x_i + sum_j J_ij S_j(t-1)))``. The average over C chains has
    a standard error of ``sqrt(variance of S_i / C)``.

    Args:
        spins: S(0), (chains, N, d).
        field: x, (N, d).
        couplings: J, (N, N) or (N, N, d, d), symmetric or not, with or without a diagonal.
        steps: >= 1.
        site: of the spins, with a ``sample``.
        generator: of the draws; None: torch's global one.

    Returns:
        :class:`GlauberRun`.

    Raises:
        TypeError, ValueError: for arguments that do not fit.
        NotImplementedError: where the site has no sampler.

    Source: Glauber (1963), https://doi.org/10.1063/1.1703954, with all spins at once (Little 1974,
    https://doi.org/10.1016/0025-5564(74)90031-5).
    """
    require_instance("site", site, Site, "a solvers.Site")
    if not isinstance(field, Tensor) or field.dim() != 2:
        got = tuple(field.shape) if isinstance(field, Tensor) else type(field).__name__
        raise ValueError(f"field must have the shape (N, d), got {got}")
    if not isinstance(spins, Tensor) or spins.dim() != 3 or spins.shape[1:] != field.shape:
        got = tuple(spins.shape) if isinstance(spins, Tensor) else type(spins).__name__
        raise ValueError(
            f"spins must have the shape (chains, N, d) = (chains, {field.shape[0]}, {field.shape[1]}), "
            f"got {got}"
        )
    if isinstance(couplings, Tensor) and couplings.dim() == 3:
        raise ValueError(
            f"couplings must be the same for all chains, (N, N) or (N, N, d, d), got "
            f"{tuple(couplings.shape)}"
        )
    check_network(spins, field.expand_as(spins), couplings, None, start="spins")
    check_finite(spins=spins, field=field, couplings=couplings)
    with torch.no_grad():
        means = [spins.mean(0)]
        for _ in range(require_count("steps", steps)):
            spins = site.sample(field + drive(couplings, spins), generator)
            means.append(spins.mean(0))
    return GlauberRun(torch.stack(means), spins)

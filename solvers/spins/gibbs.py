"""Gibbs sampling of coupled sites."""

from __future__ import annotations

import torch
from torch import Tensor

from solvers.core.checks import require_count, require_instance
from solvers.core.modes import without_autocast
from solvers.spins.inputs import (
    as_matrix,
    as_wide,
    check_inputs,
    read_given,
    read_start,
    zero_masked,
)
from solvers.spins.response import is_definite
from solvers.spins.sites import GaussianSite, Site


@torch.no_grad()
def gibbs(
    couplings: Tensor,
    field: Tensor,
    *,
    site: Site,
    sweeps: int,
    chains: int | None = None,
    generator: torch.Generator | None = None,
    start: Tensor | None = None,
    given: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    r"""Draw samples of coupled sites by Gibbs sampling in independent chains.

    For ``P(S) ~ prod_i rho(S_i) exp(1/2 sum_ij S_i^T J_ij S_j + sum_i x_i.S_i)``, one sweep draws every
    site in turn from its distribution in the current field of the others::

        S_i ~ rho(S_i) exp(h_i.S_i),   h_i = x_i + sum_j J_ij S_j

    The distribution of the chains converges to P; the number of sweeps that this takes depends on the
    couplings. To check it, compare the mean energies after n, 2n and 4n sweeps.

    Args:
        couplings: ``J`` (N, N, d, d) with zero blocks ``J_ii`` and ``J_ij^{ab} = J_ji^{ba}``.
        field: ``x`` (N, d), (1, N, d) or (chains, N, d), with the dtype and device of ``couplings``.
        site: distribution of a single site, which must define ``sample``.
        sweeps: number of sweeps over all sites.
        chains: number of independent chains; None for that of ``start`` or ``field``.
        generator: random generator on the device of ``field``; None for the global one.
        start: initial states (chains, N, d) or (1, N, d), valid values of the sites; None for draws without
            couplings.
        given: pair of values (N, d) or (chains, N, d) and bools (N,) or (chains, N), True for sites that
            are clamped to their values, which must be valid. The chains then sample the conditional
            distribution of the other sites.

    Returns:
        The last states (chains, N, d), without gradients. With sparse couplings the time of a draw is
        proportional to the number of coupled sites.

    Raises:
        TypeError, ValueError: if an argument is invalid, or if the couplings of Gaussian sites are too
            strong for a distribution of the free sites to exist.
        NotImplementedError: if the site does not define ``sample``.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> from solvers import IsingSite
        >>> J, x = torch.zeros(3, 3, 1, 1), torch.full((3, 1), 0.5)  # three free spins in a field
        >>> samples = gibbs(J, x, site=IsingSite(), sweeps=20, chains=1000, generator=generator)
        >>> means = samples.mean(0)  # <S_i> (N, d), here tanh(0.5) = 0.46
        >>> means.shape, bool((means - 0.4621).abs().max() < 0.1)
        (torch.Size([3, 1]), True)

    Source: S. Geman, D. Geman (1984), "Stochastic relaxation, Gibbs distributions, and the Bayesian
    restoration of images", https://doi.org/10.1109/TPAMI.1984.4767596.
    """
    require_instance("site", site, Site, "a solvers.Site such as IsingSite()")
    require_instance("generator", generator, torch.Generator, "a torch.Generator", optional=True)
    require_instance("start", start, Tensor, "a tensor", optional=True)
    require_count("sweeps", sweeps)
    if isinstance(field, Tensor) and field.dim() == 2:
        field = field.unsqueeze(0)
    check_inputs(couplings, field, None)
    if chains is None:
        started = len(start) if start is not None and start.dim() == 3 else 1
        chains = len(field) if len(field) != 1 else started
    shape = (require_count("chains", chains, low=0), field.shape[1], field.shape[2])
    if len(field) not in (1, chains):
        raise ValueError(f"field must have the batch size 1 or {chains} (chains), got {len(field)}")
    clamped = torch.zeros(shape[:2], dtype=torch.bool, device=field.device)
    with without_autocast(field.device.type):
        x = as_wide(field)
        state = site.sample(x.expand(shape), generator)
        if start is not None:
            one = (1, *shape[1:])
            state = read_start("start", start, one if tuple(start.shape) == one else shape, x)
            check_values("start", state, site)
        if given is not None:
            values, clamped = read_given(given, x.expand(shape))
            check_values("given", values[clamped], site)
            state = torch.where(clamped.unsqueeze(-1), values, state)
        matrix = as_matrix(couplings)
        _check_exists(matrix, x, site, ~clamped)
        rows = _coupled_rows(matrix, shape[1])
        alone = [site.at(i) for i in range(shape[1])]
        # With chains in the last dimension the coupled sites are the rows of a matrix.
        spins = state.expand(shape).permute(1, 2, 0).contiguous()  # (N, d, chains)
        x, some = x.expand(shape).permute(1, 2, 0), clamped.any(0).tolist()
        free = torch.nonzero(~clamped.all(0)).flatten().tolist()  # sites drawn in some chain
        for i in free * sweeps:
            block, coupled = rows[i]
            others = spins if coupled is None else spins.index_select(0, coupled)
            h = torch.addmm(x[i], block, others.flatten(0, 1))
            drawn = alone[i].sample(h.mT.unsqueeze(1), generator).squeeze(1).mT
            spins[i] = torch.where(clamped[:, i], spins[i], drawn) if some[i] else drawn
        return spins.permute(2, 0, 1).to(field.dtype).contiguous()


def _coupled_rows(matrix: Tensor, sites: int) -> list[tuple[Tensor, Tensor | None]]:
    """Return for each site its couplings (d, k d) to k other sites and their indices (k,).

    The indices are None, for all sites, unless most blocks of the row are zero: copying the coupled sites
    takes about as long as multiplying them.
    """
    dim = len(matrix) // sites
    blocks = matrix.view(sites, dim, sites, dim)
    rows: list[tuple[Tensor, Tensor | None]] = []
    for own in blocks:  # (d, N, d)
        coupled = own.transpose(0, 1).flatten(1).any(1).nonzero().flatten()
        if 2 * len(coupled) < sites:
            rows.append((own.index_select(1, coupled).flatten(1), coupled))
        else:
            rows.append((own.flatten(1), None))
    return rows


def _check_exists(matrix: Tensor, field: Tensor, site: Site, free: Tensor) -> None:
    """Check that the joint distribution of the ``free`` (B, N) Gaussian sites can be normalised."""
    if not isinstance(site, GaussianSite):
        return
    patterns = free.unique(dim=0)
    variance = field.new_zeros(len(patterns), *field.shape[1:], field.shape[-1])
    covariance = site.covariance(field[:1], variance[:1]).expand_as(variance)
    if not bool(is_definite(zero_masked(covariance, patterns), variance, matrix).all()):
        raise ValueError(
            "couplings are too strong: the inverse covariance of the free sites minus the couplings must "
            "be positive definite"
        )


def check_values(name: str, states: Tensor, site: Site) -> None:
    """Check that ``states`` (..., d) are valid values of the site."""
    wrong = states[~site.takes(states)]
    if len(wrong):
        shown = ", ".join(f"{entry:.4g}" for entry in wrong[0, :8].tolist())
        raise ValueError(
            f"{name} must be {site.values} for {type(site).__name__}, got [{shown}"
            f"{', ...' if wrong.shape[1] > 8 else ''}]"
        )

"""Gibbs sampling of coupled sites."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

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
from solvers.spins.sites import GaussianSite, PottsSite, Site, draw_states

# Costs that choose how to compute the field of a Potts site, in units of looking up and adding one
# number: a multiplication in a matrix product, the call of an operation.
PRODUCT, CALL = 0.08, 12_000
Draw = Callable[[int], Tensor]  # site -> its new values in all chains


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
        The last states (chains, N, d), without gradients. For many Potts chains with sparse couplings
        the time is proportional to the number of coupled pairs.

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
        chains = max(len(field), len(start) if start is not None and start.dim() == 3 else 1)
    shape = (require_count("chains", chains), field.shape[1], field.shape[2])
    if len(field) not in (1, chains):
        raise ValueError(f"field must have the batch size 1 or {chains} (chains), got {len(field)}")
    clamped = None
    with without_autocast(field.device.type):
        x = as_wide(field)
        state = site.sample(x.expand(shape), generator)
        if start is not None:
            one = (1, *shape[1:])
            state = read_start("start", start, one if tuple(start.shape) == one else shape, x)
            check_values("start", state, site)
            state = state.expand(shape)
        if given is not None:
            values, clamped = read_given(given, x.expand(shape))
            check_values("given", values[clamped], site)
            state = torch.where(clamped.unsqueeze(-1), values, state)
        matrix = as_matrix(couplings)
        _check_exists(matrix, x, site, clamped)
        sparse = _is_sparse(matrix, shape, site)
        prepare = _looking_up if sparse else _multiplying
        values, draw = prepare(
            state, x, matrix, site, generator
        )  # values[i] (chains, ...) of site i
        free = range(len(values))
        if clamped is not None:  # sites that are drawn in some chain
            free = torch.nonzero(~clamped.all(0)).flatten().tolist()
        for i in list(free) * sweeps:
            drawn = draw(i)
            if clamped is not None:
                kept = clamped[:, i].view(-1, *[1] * (drawn.dim() - 1))
                drawn = torch.where(kept, values[i], drawn)
            values[i] = drawn
        states = F.one_hot(values.T, shape[2]) if sparse else values.transpose(0, 1)
        return states.to(field.dtype).contiguous()


def _multiplying(
    state: Tensor, field: Tensor, matrix: Tensor, site: Site, generator: torch.Generator | None
) -> tuple[Tensor, Draw]:
    """Return values (N, chains, d) and draws of any site, with fields from matrix products."""
    chains, sites, dim = state.shape
    flat = state.flatten(1).clone()
    alone = [site.at(i) for i in range(sites)]

    def draw(i: int) -> Tensor:
        h = field[:, i] + flat @ matrix[:, i * dim : (i + 1) * dim]
        return alone[i].sample(h.unsqueeze(1), generator).view(chains, dim)

    return flat.view(chains, sites, dim).transpose(0, 1), draw


def _looking_up(
    state: Tensor, field: Tensor, matrix: Tensor, site: Site, generator: torch.Generator | None
) -> tuple[Tensor, Draw]:
    """Return states (N, chains) and draws of Potts sites, with fields from columns of coupled blocks."""
    chains, sites, dim = state.shape
    blocks = matrix.view(sites, dim, sites, dim).transpose(1, 2)
    neighbours = [torch.nonzero(row).flatten().tolist() for row in _coupled(matrix, sites)]
    columns = [[blocks[i, j].contiguous() for j in row] for i, row in enumerate(neighbours)]
    x = field.permute(1, 2, 0)  # (N, d, chains): operations run over the chains
    colours = state.argmax(-1).T.contiguous()

    def draw(i: int) -> Tensor:
        h = x[i].expand(dim, chains).clone()
        for block, j in zip(columns[i], neighbours[i], strict=True):
            h += block.index_select(1, colours[j])
        return draw_states(h, generator)

    return colours, draw


def _coupled(matrix: Tensor, sites: int) -> Tensor:
    """Return which blocks are nonzero, (N, N) bool."""
    dim = len(matrix) // sites
    return (matrix != 0).view(sites, dim, sites, dim).transpose(1, 2).flatten(2).any(2)


def _is_sparse(matrix: Tensor, shape: tuple[int, int, int], site: Site) -> bool:
    """Return whether looking up the neighbours' columns is cheaper than a matrix product."""
    chains, sites, dim = shape
    if type(site) is not PottsSite:
        return False
    neighbours = float(_coupled(matrix, sites).sum()) / sites
    return neighbours * (chains * dim + CALL) < PRODUCT * sites * dim * chains * dim


def _check_exists(matrix: Tensor, field: Tensor, site: Site, clamped: Tensor | None) -> None:
    """Check that the joint distribution of free Gaussian sites can be normalised."""
    if not isinstance(site, GaussianSite):
        return
    patterns = None if clamped is None else (~clamped).unique(dim=0)
    number = 1 if patterns is None else len(patterns)
    variance = field.new_zeros(number, *field.shape[1:], field.shape[-1])
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

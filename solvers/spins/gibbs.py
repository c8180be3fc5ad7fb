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

# Costs by which a way of computing a Potts site's field is chosen, in units of one number that is
# looked up and added: a number multiplied in a matrix product, the call of an operation.
PRODUCT, CALL = 0.08, 12_000
Draw = Callable[[int], Tensor]  # site -> new values of it in all chains


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
    r"""Samples of coupled sites by Gibbs sampling, in many independent chains at once.

    For ``P(S) ~ prod_i rho(S_i) exp(1/2 sum_ij S_i^T J_ij S_j + sum_i x_i.S_i)``, one sweep draws every
    site in its turn from its distribution under the current field of the others::

        S_i ~ rho(S_i) exp(h_i.S_i),   h_i = x_i + sum_j J_ij S_j

    The law of the chains approaches P with the number of sweeps; how many it takes depends on the
    couplings. Compare the mean energy after one, two and four times as many.

    Args:
        couplings: ``J`` (N, N, d, d), zero blocks ``J_ii``, ``J_ij^{ab} = J_ji^{ba}``.
        field: ``x`` (N, d) of all chains, or (chains, N, d) or (1, N, d), like ``couplings``.
        site: distribution of a single site; it must be able to ``sample``.
        sweeps: number of times that every site is drawn.
        chains: number of independent chains; None: that of ``start``, else of ``field``.
        generator: of the draws, on the device of ``field``; None: the global one.
        start: (chains, N, d) or (1, N, d) states, values that the sites can take; None: draws of the sites
            without couplings.
        given: a pair of values (N, d) or (chains, N, d) and of bools (N,) or (chains, N): where True,
            the site is clamped to its value, one that it can take. The chains then sample the others,
            given these.

    Returns:
        The last states (chains, N, d), without gradients. Where the couplings of many Potts chains are
        few, it takes time proportional to the number of coupled pairs.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument; for Gaussian sites
            whose couplings are too strong for a model of the free ones to exist.
        NotImplementedError: the site cannot draw samples.

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
    """Any site: values (N, chains, d), the field of the others by a matrix product."""
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
    """Potts sites: numbers of states (N, chains), which select columns of the coupled sites' blocks."""
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
    """(N, N) bool: the block is not zero."""
    dim = len(matrix) // sites
    return (matrix != 0).view(sites, dim, sites, dim).transpose(1, 2).flatten(2).any(2)


def _is_sparse(matrix: Tensor, shape: tuple[int, int, int], site: Site) -> bool:
    """Whether looking up the neighbours' columns costs less than a matrix product."""
    chains, sites, dim = shape
    if type(site) is not PottsSite:
        return False
    neighbours = float(_coupled(matrix, sites).sum()) / sites
    return neighbours * (chains * dim + CALL) < PRODUCT * sites * dim * chains * dim


def _check_exists(matrix: Tensor, field: Tensor, site: Site, clamped: Tensor | None) -> None:
    """Gaussian sites: the joint distribution of the free ones can be normalised."""
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
    """``states`` (..., d) are values that the site can take."""
    wrong = states[~site.takes(states)]
    if len(wrong):
        shown = ", ".join(f"{entry:.4g}" for entry in wrong[0, :8].tolist())
        raise ValueError(
            f"{name} must be {site.values} for {type(site).__name__}, got [{shown}"
            f"{', ...' if wrong.shape[1] > 8 else ''}]"
        )

"""Spins in time: mean-field closures of parallel dynamics, their steady states, and Monte Carlo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solvers.core.checks import require_choice, require_count, require_instance
from solvers.core.modes import without_autocast
from solvers.core.solution import Solution, check_on_failure
from solvers.core.tolerance import Tolerance
from solvers.fixed_points import fixed_point
from solvers.spins.inputs import as_wide, check_field, check_like_field, check_mask, zero_masked
from solvers.spins.kinetic_laws import LAWS, LargeSphereLaw, Law, SphereLaw
from solvers.spins.sites import IsingSite, PottsSite, Site, SphericalSite


def drive(couplings: Tensor, values: Tensor) -> Tensor:
    """``sum_j J_ij v_j`` of ``values`` (B, N, k); couplings that samples share in one matrix product."""
    if couplings.dim() == 2:
        rows = values.mT.reshape(-1, values.shape[1]) @ couplings.mT
        return rows.view(len(values), -1, values.shape[1]).mT
    return couplings @ values


def check_finite(mask: Tensor | None = None, **tensors: Tensor) -> None:
    """ValueError that names the first of ``tensors`` with NaN or infinity, (B, N, d) where not masked;
    not on a GPU, where asking would wait for the device."""
    for name, value in tensors.items():
        if value.device.type != "cpu" or bool(value.detach().sum().isfinite()):
            continue
        known = zero_masked(value.detach(), None if name == "couplings" else mask)
        if not bool(known.isfinite().all()):
            raise ValueError(f"{name} must be finite, got NaN or infinity")


def check_network(mean: Any, field: Any, couplings: Any, mask: Any, start: str = "mean") -> None:
    """``mean`` (in errors ``start``) and ``field`` (B, N, d), couplings (N, N) or (B, N, N), a mask (B, N)
    bool or None."""
    batch, sites, _ = shape = check_field(field)
    check_like_field(start, mean, field, shape)
    check_like_field("couplings", couplings, field, (sites, sites), (batch, sites, sites))
    check_mask(mask, field)


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
    an equation for the means after it, ``m(t) = F(m(t), m(t-1))``, and this is ``F(m, m)``. Arguments,
    result and errors: as for :func:`kinetic_step`.
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
    theta, squares = field + drive(couplings, mean), couplings.square()
    if closure == "naive":
        after = law.mean(theta)
        return lambda now: after
    if closure == "gaussian":
        spread = drive(squares, zero_masked(law.scatter(mean), mask))  # tr B_i
        after = law.averaged(theta, spread)
        return lambda now: after
    if closure == "tap" or isinstance(site, IsingSite | PottsSite):
        covariance = zero_masked(law.covariance(mean), mask)
        noise = drive(squares, covariance.flatten(2)).view_as(covariance)  # B_i
        return lambda now: site.mean(theta - (noise @ now.unsqueeze(-1)).squeeze(-1), noise)
    assert isinstance(law, LargeSphereLaw)
    return _plefka(law, theta, mean, squares, mask)


def law_of(site: Site, dim: int) -> Law:
    """What the closures know of a site; ValueError for spins of a dimension that it cannot have."""
    if isinstance(site, IsingSite) and dim != 1:
        raise ValueError(f"IsingSite takes spins of one component, d = 1, got d = {dim}")
    if isinstance(site, SphericalSite):
        return (LargeSphereLaw if site.large_dimension else SphereLaw)(site, dim)
    found = [law for kind, law in LAWS.items() if isinstance(site, kind)]
    return found[0](site) if found else Law(site)


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


def _plefka(
    law: LargeSphereLaw, theta: Tensor, mean: Tensor, squares: Tensor, mask: Tensor | None
) -> Rule:
    """``h <- theta + 1/2 C^-1 T:(v v^T + B)``, ``v = theta - h``, at the field h of the means now."""
    slope, root = law.response(mean)
    isotropic = drive(squares, zero_masked(slope, mask))
    outer = 2 / root * mean.square().sum(-1, keepdim=True)
    spread = law.dim * isotropic - drive(squares, zero_masked(outer, mask))  # tr B
    pulled = zero_masked(2 / root * mean, mask)

    def reacted(now: Tensor) -> Tensor:
        product = isotropic * now - (squares * (now @ mean.mT)) @ pulled  # B m
        distance = theta - now / law.response(now).slope
        return law.mean(theta + law.reaction(distance, now, spread, product))

    return reacted


INNER = {torch.float64: 1e-10, torch.float32: 1e-6}  # relative residual of the means after a step


def kinetic_step(
    mean: Tensor,
    field: Tensor,
    couplings: Tensor,
    *,
    site: Site,
    closure: str = "gaussian",
    mask: Tensor | None = None,
    max_steps: int = 200,
    on_failure: str = "warn",
) -> Tensor:
    r"""The means of spins after one step of parallel dynamics, in a mean-field closure.

    All spins are drawn at once, from their site's distribution in the field of the spins before::

        P(S_i(t)) ~ rho(S_i) exp(h_i.S_i),   h_i = x_i + sum_j J_ij S_j(t-1)

    The couplings need not be symmetric, and a site may couple to itself. With ``theta_i`` the same with
    the means ``m_j(t-1)``, C_j the covariance of a site with that mean, ``B_i = sum_j J_ij^2 C_j``
    and ``mu(h, V)`` the mean of a site (:class:`solvers.Site`), the closures are

    - "naive": ``m_i(t) = mu(theta_i, 0)``;
    - "gaussian": the average of mu over a Gaussian field with mean theta_i and covariance B_i, for
      Ising spins by quadrature, for spheres with ``|h|^2`` replaced by ``|theta_i|^2 + tr B_i``. It is
      exact for many weak random couplings, and spheres of many dimensions; on those of few it is right
      to first order in J only, as "naive" is;
    - "tap": ``m_i(t) = mu(theta_i - B_i m_i(t), B_i)``, an equation that is solved in each sample. For
      Ising and Potts spins this is Plefka's expansion to second order;
    - "plefka": that expansion for other sites too, with their third cumulant T:
      ``m_i(t) = mu(h_i, 0)``, ``h_i = theta_i + 1/2 C_i^-1 T_i:(v_i v_i^T + B_i)``,
      ``v_i = theta_i - h_i``. It fails for strong couplings, where "gaussian" does not.

    Args:
        mean: m(t-1), (B, N, d).
        field: x, (B, N, d).
        couplings: J, numbers (N, N), or (B, N, N) for each sample.
        site: of the spins. "gaussian" takes Ising, Gaussian and spherical sites, "tap" Potts sites too,
            "plefka" ``SphericalSite(large_dimension=True)``, Ising and Potts sites.
        closure: one of the four.
        mask: (B, N) bool, False for masked sites, which influence no other and keep their mean.
        max_steps, on_failure: of the equation of "tap" and "plefka", as in :func:`fixed_point`.

    Returns:
        m(t), (B, N, d). Gradients flow to mean, field and couplings, and to the site's parameters.

    Raises:
        TypeError, ValueError: for arguments that do not fit, or a closure that the site does not have;
            with "tap" and "plefka" for NaN or infinity outside masked sites, on the CPU.
        SolveError: with ``on_failure="raise"``, where "tap" or "plefka" has no solution.

    Source: Aguilera, Moosavi, Shimazaki, "A unifying framework for mean-field theories of asymmetric
    kinetic Ising systems" (2021), https://doi.org/10.1038/s41467-021-20890-5, for Ising spins; Mezard
    and Sakellariou (2011), https://arxiv.org/abs/1103.3433, for the Gaussian closure;
    Bal, https://mcbal.github.io/post/spin-model-transformers/, for spheres.
    """
    require_count("max_steps", max_steps)
    check_on_failure(on_failure)
    if closure not in REACTING:
        return kinetic_map(mean, field, couplings, site=site, closure=closure, mask=mask)
    check_network(mean, field, couplings, mask)
    check_closure(site, closure)
    check_finite(mask, mean=mean, field=field, couplings=couplings)

    with without_autocast(mean.device.type):
        before, x = (as_wide(zero_masked(tensor, mask)) for tensor in (mean, field))
        j = as_wide(couplings)
        guess = closed(before, x, j, site, "naive", mask)(before)
        # The rule holds tensors of all samples, so that what depends on the past is computed once.
        solution = fixed_point(
            closed(before, x, j, site, closure, mask),
            guess.detach(),
            tolerance=Tolerance(rtol=INNER[x.dtype]),
            max_steps=max_steps,
            mask=mask,
            on_failure=on_failure,
            compact=False,
        )
    after = solution.value.to(mean.dtype)
    return after if mask is None else torch.where(mask.unsqueeze(-1), after, mean)


def kinetic_trajectory(
    mean: Tensor, field: Tensor, couplings: Tensor, *, steps: int, site: Site, **options: Any
) -> Tensor:
    """The means m(0) to m(steps) from ``mean`` = m(0), (steps + 1, B, N, d).

    Spins that are known may stand for their means: they make no noise. ``options`` (closure, mask,
    max_steps, on_failure), the other arguments and the errors are those of :func:`kinetic_step`.
    """
    means = [mean]
    for _ in range(require_count("steps", steps)):
        means.append(kinetic_step(means[-1], field, couplings, site=site, **options))
    return torch.stack(means)


def steady_state(
    field: Tensor,
    couplings: Tensor,
    *,
    site: Site,
    closure: str = "gaussian",
    start: Tensor | None = None,
    mask: Tensor | None = None,
    **options: Any,
) -> Solution:
    """Means that a step leaves as they are, ``m = kinetic_step(m, field, couplings)``, differentiably.

    Args:
        field, couplings, site, closure, mask: as for :func:`kinetic_step`.
        start: the first means (B, N, d); None: those of the sites in the field alone.
        options: of :func:`fixed_point`: solver, tolerance, max_steps, adjoint, on_failure, ...

    Returns:
        A :class:`Solution`, whose ``value`` are the means (B, N, d). Gradients reach field, couplings
        and the site's parameters by the implicit function theorem.

    Raises:
        TypeError, ValueError, SolveError: as for :func:`kinetic_step` and :func:`fixed_point`.
    """
    check_network(field if start is None else start, field, couplings, mask, start="start")
    check_closure(site, closure)
    check_finite(mask, field=field, couplings=couplings)
    if start is None:
        with torch.no_grad(), without_autocast(field.device.type):
            law = law_of(site, field.shape[-1])
            known = torch.where(field.isfinite(), field.detach(), 0.0)  # else at a masked site
            start = law.mean(as_wide(known)).to(field.dtype)
    else:
        check_finite(start=start)
    field = zero_masked(field, mask)
    apart = couplings.dim() == 3

    def rule(mean: Tensor, field: Tensor, own: Tensor | None, mask: Tensor | None) -> Tensor:
        j = couplings if own is None else own
        return kinetic_map(mean, field, j, site=site, closure=closure, mask=mask)

    return fixed_point(
        rule, start, (field, couplings if apart else None, mask), mask=mask, **options
    )


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
        couplings: J, (N, N), symmetric or not, with or without a diagonal.
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
    shapes = {"field": "(N, d)", "spins": "(chains, N, d)", "couplings": "(N, N)"}
    for (name, shape), value in zip(shapes.items(), (field, spins, couplings), strict=True):
        if not isinstance(value, Tensor) or value.dim() != 1 + shape.count(","):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} must have the shape {shape}, got {got}")
    check_network(spins, field.expand(len(spins), -1, -1), couplings, None, start="spins")
    check_finite(spins=spins, field=field, couplings=couplings)
    with torch.no_grad():
        means = [spins.mean(0)]
        for _ in range(require_count("steps", steps)):
            spins = site.sample(field + drive(couplings, spins), generator)
            means.append(spins.mean(0))
    return GlauberRun(torch.stack(means), spins)

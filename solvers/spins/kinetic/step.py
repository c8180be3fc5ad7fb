"""Mean-field theories of spins in time: steps, trajectories and steady states."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from solvers.core.checks import require_count
from solvers.core.modes import without_autocast
from solvers.core.solution import Solution, check_on_failure
from solvers.core.tolerance import Tolerance
from solvers.fixed_points import fixed_point
from solvers.spins.inputs import as_wide, zero_masked
from solvers.spins.kinetic.couplings import check_finite, check_network
from solvers.spins.kinetic.maps import REACTING, check_closure, closed, kinetic_map, law_of
from solvers.spins.sites.site import Site

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
    the means ``m_j(t-1)``, C_j the covariance of a site with that mean, ``B_i = sum_j J_ij C_j J_ij^T``
    and ``mu(h, V)`` the mean of a site (:class:`solvers.Site`), the closures are

    - "naive": ``m_i(t) = mu(theta_i, 0)``;
    - "gaussian": the average of mu over a Gaussian field with mean theta_i and covariance B_i, for
      Ising spins by quadrature, for spheres with ``|h|^2`` replaced by ``|theta_i|^2 + tr B_i``. It is
      exact for many weak random couplings, and spheres of many dimensions. On spheres of few
      dimensions it is right to first order in J only, as "naive" is: with few neighbours prefer "tap";
    - "tap": ``m_i(t) = mu(theta_i - B_i m_i(t), B_i)``, an equation that is solved in each sample. For
      Ising and Potts spins this is Plefka's expansion to second order;
    - "plefka": that expansion for other sites too, with their third cumulant T:
      ``m_i(t) = mu(h_i, 0)``, ``h_i = theta_i + 1/2 C_i^-1 T_i:(v_i v_i^T + B_i)``,
      ``v_i = theta_i - h_i``. It fails for strong couplings, where "gaussian" does not.

    Args:
        mean: m(t-1), (B, N, d).
        field: x, (B, N, d).
        couplings: J, (N, N), numbers; (B, N, N), numbers for each sample; or (N, N, d, d).
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
    mean: Tensor,
    field: Tensor,
    couplings: Tensor,
    *,
    steps: int,
    site: Site,
    closure: str = "gaussian",
    mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The means m(0) to m(steps) from ``mean`` = m(0), (steps + 1, B, N, d).

    Spins that are known may stand for their means: they make no noise. ``options`` are ``max_steps`` and
    ``on_failure`` of :func:`kinetic_step`, as are the other arguments and the errors.
    """
    means = [mean]
    for _ in range(require_count("steps", steps)):
        means.append(
            kinetic_step(
                means[-1], field, couplings, site=site, closure=closure, mask=mask, **options
            )
        )
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
    rule = partial(_steady_map, shared=None if apart else couplings, site=site, closure=closure)
    args = (field, couplings if apart else None, mask)
    return fixed_point(rule, start, args, mask=mask, **options)


def _steady_map(
    mean: Tensor,
    field: Tensor,
    own: Tensor | None,
    mask: Tensor | None,
    *,
    shared: Tensor | None,
    site: Site,
    closure: str,
) -> Tensor:
    couplings = shared if own is None else own
    assert couplings is not None
    return kinetic_map(mean, field, couplings, site=site, closure=closure, mask=mask)

"""The entry for spins: means, covariances and responses of coupled vector sites.

Words of this package: the *response* is ``chi = (C^-1 + V - J)^-1``, the *cavity variance* of a site
is ``V_i``, the *cavity field* is ``h_i``. A *masked* site is one whose entry in ``mask`` is False.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solvers.adjoints.kinds import Adjoint, Implicit
from solvers.core.checks import require_choice, require_flag, require_instance
from solvers.core.modes import eager, without_autocast
from solvers.core.solution import Solution, Status, apply_policy, check_on_failure
from solvers.core.tolerance import Tolerance
from solvers.spins.free_energy import ORDERS, free_energy
from solvers.spins.inputs import (
    as_matrix,
    as_wide,
    check_inputs,
    read_betas,
    read_given,
    read_start,
    usual_tolerance,
    with_dimensions,
    with_symmetries,
    zero_masked,
)
from solvers.spins.response import linear_response
from solvers.spins.sites import PottsSite, Site, read_site
from solvers.spins.theories import AdaptiveTAP, CoupledSites, SpinState, cavity_field, solve_theory

_DEFAULT_ADJOINT = Implicit()
_WHAT = {
    "adaptive": "adaptive TAP solve",
    "second": "second-order TAP solve",
    "naive": "mean-field solve",
}


class SpinMarginals(NamedTuple):
    """What :func:`adaptive_tap` finds.

    Attributes:
        mean: (B, N, d).
        covariance: (B, N, d, d) of each site.
        cavity_variance: (B, N, d, d) ``V``; zero for the naive mean field.
        response: (B, N, d, N, d) ``chi``, or None where it was not asked for.
        log_partition: (B,) ``log Z``, at least float32, or None where it was not asked for.
    """

    mean: Tensor
    covariance: Tensor
    cavity_variance: Tensor
    response: Tensor | None = None
    log_partition: Tensor | None = None


@eager
def adaptive_tap(
    couplings: Tensor,
    field: Tensor,
    *,
    site: Site | type[Site] | str,
    order: str = "adaptive",
    damping: float | None = None,
    tolerance: Tolerance | float | None = None,
    max_steps: int = 200,
    adjoint: Adjoint | type[Adjoint] | str | None = _DEFAULT_ADJOINT,
    mask: Tensor | None = None,
    given: tuple[Tensor, Tensor] | None = None,
    start: SpinState | SpinMarginals | None = None,
    inverse_temperature: float | Sequence[float] = 1.0,
    response: bool = False,
    log_partition: bool = False,
    record: bool = False,
    on_failure: str = "warn",
) -> Solution:
    r"""Means, covariances and free energies of coupled sites by mean-field theories.

    For ``P(S) ~ prod_i rho(S_i) exp(1/2 sum_ij S_i^T J_ij S_j + sum_i x_i.S_i)`` find, sample by
    sample, means m and cavity variances V with::

        h_i = x_i + sum_j J_ij m_j - V_i m_i,   m_i = site mean,  C_i = site covariance at (h_i, V_i)

        order "adaptive":  Lambda_i = V_i + C_i^-1,   chi = (Lambda - J)^-1,   [chi]_ii = C_i
        order "second":    V_i = sum_j J_ij C_j J_ji
        order "naive":     V_i = 0

    The adaptive equations are exact for Gaussian sites; ``chi`` is positive definite at every iterate
    (:func:`solvers.tap_step`, :class:`solvers.AdaptiveTAP`). Gradients reach couplings, field, ``given``
    values and the parameters of the site by implicit differentiation.

    Args:
        couplings: ``J`` (N, N, d, d), zero blocks ``J_ii``, ``J_ij^{ab} = J_ji^{ba}``; or (N, N) where
            d = 1. Its gradient has the same symmetry and the same zeros.
        field: ``x`` (B, N, d), dtype and device like ``couplings``; with couplings (N, N) also (B, N),
            or (N,) of one sample. The results have all dimensions.
        site: distribution of a single site, for example ``IsingSite()``, or its name: "ising", "potts",
            "spherical", "torus".
        order: "adaptive", "second" (the TAP equations in second order of the couplings) or "naive".
        damping: None: Anderson acceleration with automatic damping; a number in (0, 1]: damped steps.
        tolerance: of the joint fixed point; None: rtol 1e-10 in float64, 1e-5 in float32.
        max_steps: evaluations per sample, an upper bound.
        adjoint: as for :func:`solvers.fixed_point`; None: no gradients. ``Unrolled`` takes ``chi C^-1``
            for constant at each step: its gradient is the solution's up to the size of the residual.
        mask: (B, N) bool, False for masked sites: they influence no other, their results are zero.
        given: a pair of values (B, N, d) and of bools (B, N): where True, the site is clamped. It keeps
            its value, acts on the others, and has no covariance. Free sites may hold any value, also
            NaN. A value may also be a mean, of a spin that is known in part.
        start: warm start, means and variances of an earlier solution, taken as constants. Where its
            ``chi`` is not positive definite, a sample starts as usual.
        inverse_temperature: ``beta`` > 0 that multiplies couplings and fields. Several are a schedule
            of annealing: a solve at each, in that order, which starts from the solution before it. The
            results and the gradients are those of the last, ``steps`` and ``evaluations`` of all;
            ``max_steps`` holds for each.
        response: return ``chi`` too, the linear-response estimate of the correlations
            ``<S_i S_j> - <S_i><S_j>``. It is ``dm_i/dx_j`` at fixed V; autograd gives the derivative
            of the solution, in which V changes too. Naive or second-order means may converge where
            ``chi`` is indefinite, which is checked only here.
        log_partition: return ``log Z`` too, for priors of weight 1 (:mod:`solvers.spins.free_energy`
            has the formulas); with ``given``, the sum over the free sites alone. Its gradient is that
            of the model at the solution, ``d log Z / dx = beta m`` (a pair counts once:
            ``couplings.grad[i, j]`` is ``beta / 2 (m_i m_j^T + ...)``), at no adjoint solve; for
            ``SphericalSite(large_dimension=True)``, which is no distribution, up to O(1/d).
        record: keep the trace of residuals.
        on_failure: "warn", "raise" or "ignore" about samples that did not converge.

    Returns:
        A :class:`Solution` whose ``value`` is a :class:`SpinMarginals`, without NaN. Where a sample has
        not converged, its means are those of its sites at the cavity fields of the best iterate, and
        ``log Z`` is no estimate that can be relied on.
        ``Status.INDEFINITE``: no further iterate with a positive definite ``chi`` was found, because
        the model does not exist (Gaussian sites, ``Sigma^-1 - J`` indefinite) or the couplings are too
        strong. Then the last iterate with one is returned; where there is none, the starting point,
        with an infinite residual and, as ``response``, the covariances of uncoupled sites; ``log Z``
        lacks its determinant.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.

    Source: Opper and Winther (2001), "Adaptive and self-averaging Thouless-Anderson-Palmer mean-field
    theory for probabilistic modeling", https://doi.org/10.1103/PhysRevE.64.056131.
    """
    require_flag("response", response)
    require_flag("log_partition", log_partition)
    site = read_site(site)
    couplings, field = with_dimensions(couplings, field)
    require_choice("order", order, ORDERS)
    betas = read_betas(inverse_temperature)
    check_inputs(couplings, field, mask)
    check_on_failure(on_failure)
    options = {
        "solver": AdaptiveTAP(damping=damping),
        "tolerance": usual_tolerance(tolerance, field.dtype),
        "max_steps": max_steps,
        "adjoint": adjoint,
        "record": record,
        "on_failure": "ignore",
    }
    tracked = adjoint is not None and torch.is_grad_enabled()
    with torch.set_grad_enabled(tracked):
        couplings, state = with_symmetries(couplings), _read_start(start, field)
        held: tuple[Tensor, Tensor, Tensor] | None = None
        if given is not None:
            values, clamped = read_given(given, field)
            clamped = clamped if mask is None else clamped & mask
            values = zero_masked(values, clamped)
            with without_autocast(field.device.type):  # they act as fields on the free sites
                wide = as_wide(values)
                pull = (wide.flatten(1) @ as_matrix(couplings)).view_as(wide)
                energy = (wide * (as_wide(field) + pull / 2)).flatten(1).sum(1)
            held = values, clamped, energy
            field, mask = (
                field + pull.to(field.dtype),
                ~clamped if mask is None else ~clamped & mask,
            )
        earlier: list[Solution] = []
        for beta in betas[:-1]:
            model = CoupledSites(beta * couplings, beta * field, site, mask)
            with torch.no_grad():
                earlier.append(solve_theory(order, model, state, options))
            state = earlier[-1].value
        beta = betas[-1]
        model = CoupledSites(beta * couplings, beta * field, site, mask)
        solution = solve_theory(order, model, state, options)
        solution.steps = solution.steps + sum(each.steps for each in earlier)
        solution.evaluations = solution.evaluations + sum(each.evaluations for each in earlier)
        _complete(solution, model, order, response, log_partition)
        if held is not None:
            values, clamped, energy = held
            found = solution.value
            mean = torch.where(clamped.unsqueeze(-1), values, found.mean)
            log_z = found.log_partition + beta * energy if log_partition else None
            solution.value = found._replace(mean=mean, log_partition=log_z)
    apply_policy(solution, on_failure, _WHAT[order])
    return solution


def _complete(
    solution: Solution, model: CoupledSites, order: str, response: bool, log_partition: bool
) -> None:
    """Replace the solved state by :class:`SpinMarginals`."""
    couplings, field, site, mask = model
    with without_autocast(field.device.type):
        mean, variance = (as_wide(t) for t in solution.value)
        matrix, x, dtype = as_matrix(couplings), as_wide(field), field.dtype
        own, covariance = site.moments(cavity_field(mean, variance, x, matrix, mask), variance)
        # An extrapolated iterate may lie outside of the domain, a site's own mean does not. A sample
        # without an iterate (infinite residual) keeps its start. The gradient is that of the iterate.
        kept = solution.converged | solution.residual.isinf()
        change = torch.where(kept[:, None, None] | ~own.isfinite(), 0.0, own - mean)
        mean = mean + change.detach()
        if isinstance(site, PottsSite):  # a distribution, which damped steps approach from outside
            total = mean.sum(-1, keepdim=True)
            mean = mean / torch.where(total > 0, total, 1.0)
        mean, covariance, variance = (zero_masked(t, mask) for t in (mean, covariance, variance))
        whole = log_z = None
        if response:
            whole, exists = linear_response(covariance, variance, matrix)
            solution.status = torch.where(exists, solution.status, int(Status.INDEFINITE))
            whole = whole.to(dtype)
        if log_partition:
            log_z, exists = free_energy(order, (mean, variance, covariance), x, matrix, site, mask)
            solution.status = torch.where(exists, solution.status, int(Status.INDEFINITE))
    mean, covariance, variance = (t.to(dtype) for t in (mean, covariance, variance))
    solution.value = SpinMarginals(mean, covariance, variance, whole, log_z)


def _read_start(start: Any, field: Tensor) -> SpinState | None:
    """A warm start like ``field``, detached, or None."""
    if start is None:
        return None
    require_instance("start", start, SpinState | SpinMarginals, "a SpinState or SpinMarginals")
    shape, name = (*field.shape, field.shape[-1]), "start.cavity_variance"
    return SpinState(
        read_start("start.mean", start.mean, shape[:3], field),
        read_start(name, start.cavity_variance, shape, field),
    )

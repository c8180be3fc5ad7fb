"""The entry for spins: means, covariances and responses of coupled vector sites.

Words of this package: the *response* is ``chi = (C^-1 + V - J)^-1``, the *cavity variance* of a site
is ``V_i``, the *cavity field* is ``h_i``. A *masked* site is one whose entry in ``mask`` is False.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solvers.adjoints.kinds import Adjoint, Implicit
from solvers.core.checks import require_flag, require_instance
from solvers.core.device import maybe_any
from solvers.core.modes import eager, without_autocast
from solvers.core.solution import Solution, Status, apply_policy, check_on_failure
from solvers.core.tolerance import Tolerance
from solvers.fixed_points import fixed_point
from solvers.spins.inputs import as_matrix, as_wide, check_inputs, with_symmetries, zero_masked
from solvers.spins.maps import SpinState, cavity_field, no_variance, starting_state, tap_step
from solvers.spins.response import differentiable_response, is_definite, times_blocks
from solvers.spins.sites.site import Site
from solvers.spins.solver import AdaptiveTAP

_DEFAULT_ADJOINT = Implicit()
_RTOL = {torch.float64: 1e-10, torch.float32: 1e-5}  # half precision: 1e-2


class SpinMarginals(NamedTuple):
    """What :func:`adaptive_tap` finds.

    Attributes:
        mean: (B, N, d).
        covariance: (B, N, d, d) of each site.
        cavity_variance: (B, N, d, d) ``V``; zero for the naive mean field.
        response: (B, N, d, N, d) ``chi``, or None where it was not asked for.

    For a site whose covariance does not depend on the field, ``covariance``, ``cavity_variance`` and
    ``response`` are one sample's, expanded.
    """

    mean: Tensor
    covariance: Tensor
    cavity_variance: Tensor
    response: Tensor | None = None


@eager
def adaptive_tap(
    couplings: Tensor,
    field: Tensor,
    *,
    site: Site,
    damping: float | None = None,
    tolerance: Tolerance | None = None,
    max_steps: int = 200,
    adjoint: Adjoint | None = _DEFAULT_ADJOINT,
    mask: Tensor | None = None,
    onsager: bool = True,
    response: bool = False,
    record: bool = False,
    on_failure: str = "warn",
) -> Solution:
    r"""Means and covariances of coupled sites by the adaptive TAP (mean-field) equations.

    For ``P(S) ~ prod_i rho(S_i) exp(1/2 sum_ij S_i^T J_ij S_j + sum_i x_i.S_i)`` find, sample by
    sample, means m and cavity variances V with::

        h_i = x_i + sum_j J_ij m_j - V_i m_i,   m_i = site mean,  C_i = site covariance at (h_i, V_i)
        Lambda_i = V_i + C_i^-1,   chi = (Lambda - J)^-1,   [chi]_ii = C_i

    They are exact for Gaussian sites. The joint fixed point of m and V (:func:`solvers.tap_step`) is
    found by :func:`solvers.fixed_point` with :class:`solvers.AdaptiveTAP`; ``chi`` is positive definite
    at every iterate, the first included. Gradients reach couplings, field and the parameters of the
    site by implicit differentiation.

    Args:
        couplings: ``J`` (N, N, d, d), zero blocks ``J_ii``, ``J_ij^{ab} = J_ji^{ba}``. Its gradient has
            the same symmetry and the same zeros.
        field: ``x`` (B, N, d), dtype and device like ``couplings``.
        site: distribution of a single site, for example ``IsingSite()``.
        damping: None: Anderson acceleration with automatic damping; a number in (0, 1]: damped
            iteration ``z + damping (f(z) - z)``.
        tolerance: of the joint fixed point; None: rtol 1e-10 in float64, 1e-5 in float32.
        max_steps: evaluations per sample, an upper bound; for a site whose covariance does not depend on
            the field, of the variances and again of the means (``trace`` is that of the means).
        adjoint: as for :func:`solvers.fixed_point`; None: no gradients. ``Unrolled`` takes ``chi C^-1``
            for constant at each step: its gradient is the solution's up to the size of the residual.
        mask: (B, N) bool, False for masked sites: they influence no other, their results are zero.
        onsager: False: the naive mean field, V = 0.
        response: return ``chi`` too, the linear-response estimate of the correlations
            ``<S_i S_j> - <S_i><S_j>``. It is ``dm_i/dx_j`` at fixed V; autograd gives the derivative
            of the solution, in which V changes too. With ``onsager=False`` both are the same. The
            naive means may converge where ``chi`` is indefinite, which is checked only here.
        record: keep the trace of residuals.
        on_failure: "warn", "raise" or "ignore" about samples that did not converge.

    Returns:
        A :class:`Solution` whose ``value`` is a :class:`SpinMarginals`, without NaN. Where a sample has
        not converged, its means are those of its sites at the cavity fields of the best iterate, which
        itself may lie outside of the sites' domain; ``residual`` is the iterate's.
        ``Status.INDEFINITE``: no further iterate with a positive definite ``chi`` was found, because
        the model does not exist (Gaussian sites, ``Sigma^-1 - J`` indefinite) or the couplings are too
        strong. Then the last iterate with one is returned; where there is none, the starting point,
        with an infinite residual and, as ``response``, the covariances of uncoupled sites.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.

    Source: Opper and Winther (2001), "Adaptive and self-averaging Thouless-Anderson-Palmer mean-field
    theory for probabilistic modeling", https://doi.org/10.1103/PhysRevE.64.056131.
    """
    require_flag("onsager", onsager)
    require_flag("response", response)
    require_instance("site", site, Site, "a solvers.Site such as IsingSite()")
    check_inputs(couplings, field, mask)
    check_on_failure(on_failure)
    options = {
        "solver": AdaptiveTAP(damping=damping),
        "tolerance": Tolerance(_RTOL.get(field.dtype, 1e-2)) if tolerance is None else tolerance,
        "max_steps": max_steps,
        "adjoint": adjoint,
        "record": record,
        "on_failure": "ignore",
    }
    model = _Model(with_symmetries(couplings), field, site, mask, options)
    if not onsager:
        solution = model.solve_naive()
    elif site.field_dependent or mask is not None:
        solution = model.solve()
    else:
        solution = model.solve_shared()
    with torch.set_grad_enabled(adjoint is not None and torch.is_grad_enabled()):
        model.complete(solution, response)
    what = "adaptive TAP solve" if onsager else "mean-field solve"
    apply_policy(solution, on_failure, what)
    return solution


@dataclass(frozen=True)
class _Model:
    """Coupled sites in their fields, and the options of :func:`solvers.fixed_point`."""

    couplings: Tensor
    field: Tensor
    site: Site
    mask: Tensor | None
    options: dict[str, Any]

    def _fixed_point(self, step: Callable[..., Any], start: Any) -> Solution:
        return fixed_point(step, start, (self.field, self.mask), mask=self.mask, **self.options)

    def solve(self) -> Solution:
        """The joint fixed point of every sample."""

        def step(state: SpinState, field: Tensor, mask: Tensor | None) -> SpinState:
            return tap_step(state, field, self.couplings, self.site, mask)

        start = starting_state(self.field, self.couplings, self.site, self.mask)
        return self._fixed_point(step, start)

    def solve_naive(self) -> Solution:
        """The fixed point of the means at V = 0: mean field without Onsager term."""

        def step(mean: Tensor, field: Tensor, mask: Tensor | None) -> Tensor:
            with without_autocast(mean.device.type):
                m, x, j = as_wide(mean), as_wide(field), as_matrix(self.couplings)
                h = cavity_field(m, None, x, j, mask)
                return self.site.mean(h, no_variance(m)).to(mean.dtype)

        start = torch.zeros_like(self.field)
        solution = self._fixed_point(step, start)
        solution.value = SpinState(solution.value, no_variance(start))
        return solution

    def solve_shared(self) -> Solution:
        """Cavity variances once for all samples, then the means, which depend on them linearly."""
        alone = replace(self, field=self.field.new_zeros(1, *self.field.shape[1:]))
        first = alone.solve()
        variance = first.value.cavity_variance
        exists = bool(torch.isfinite(first.residual).all())
        with torch.no_grad(), without_autocast(self.field.device.type):
            wide = as_wide(variance)
            covariance = self.site.covariance(as_wide(alone.field), wide)
            newton = _newton_matrix(covariance, wide, as_matrix(self.couplings))

        def step(mean: Tensor, field: Tensor, mask: None) -> Tensor:
            if not exists:  # stay at the starting point
                return 0.0 * (mean + field)
            with without_autocast(mean.device.type):
                m, x, j = as_wide(mean), as_wide(field), as_matrix(self.couplings)
                v = as_wide(variance)
                residual = self.site.mean(cavity_field(m, v, x, j, mask), v) - m
                return (m + (residual.flatten(1) @ newton).view_as(m)).to(mean.dtype)

        solution = self._fixed_point(step, torch.zeros_like(self.field))
        solution.status = torch.where(first.converged, solution.status, first.status)
        solution.residual = torch.maximum(solution.residual, first.residual)
        solution.residual_norm = torch.maximum(solution.residual_norm, first.residual_norm)
        solution.steps = solution.steps + first.steps
        solution.evaluations = solution.evaluations + first.evaluations
        solution.value = SpinState(solution.value, variance)
        return solution

    def complete(self, solution: Solution, response: bool) -> None:
        """Replace the solved state by :class:`SpinMarginals`."""
        with without_autocast(self.field.device.type):
            mean, variance = (as_wide(t) for t in solution.value)
            matrix = as_matrix(self.couplings)
            field = cavity_field(mean, variance, as_wide(self.field), matrix, self.mask)
            if self.site.field_dependent and maybe_any(~solution.converged):
                own, covariance = self.site.moments(field, variance)
                mean = _within_domain(mean, own, solution)
            else:
                covariance = self.site.covariance(field, variance)
            covariance = zero_masked(covariance, self.mask)
            results = [zero_masked(mean, self.mask), covariance, zero_masked(variance, self.mask)]
            if response:
                results.append(self._response(solution, covariance, variance, matrix))
        solution.value = SpinMarginals(
            *(t.expand(len(mean), *t.shape[1:]).to(self.field.dtype) for t in results)
        )

    def _response(
        self, solution: Solution, covariance: Tensor, variance: Tensor, matrix: Tensor
    ) -> Tensor:
        """``C + C Q C`` (B, N, d, N, d), ``C`` alone where chi is not positive definite."""
        sites, dim = covariance.shape[1:3]
        variance = variance.expand_as(covariance)
        with torch.no_grad():
            definite = is_definite(covariance, variance, matrix)
        solution.status = torch.where(definite, solution.status, int(Status.INDEFINITE))
        unit = torch.eye(sites, dtype=covariance.dtype, device=covariance.device)
        response = covariance.unsqueeze(3) * unit[:, None, :, None]
        rows = torch.nonzero(definite).flatten()
        part = covariance[rows]
        amputated, _ = differentiable_response(part, variance[rows], matrix)
        right = times_blocks(amputated, part).view(len(rows), sites, dim, sites * dim)
        return response.index_add(0, rows, (part @ right).view(len(rows), *response.shape[1:]))


def _within_domain(mean: Tensor, own: Tensor, solution: Solution) -> Tensor:
    """``mean``, but in samples that have not converged the sites' ``own`` means at its cavity fields.

    An extrapolated iterate may lie outside of the domain, a site's mean does not. A sample without an
    iterate (infinite residual) keeps its start. The gradient is that of ``mean``.
    """
    kept = solution.converged | solution.residual.isinf()
    change = torch.where(kept[:, None, None] | ~own.isfinite(), 0.0, own - mean)
    return mean + change.detach()


def _newton_matrix(covariance: Tensor, variance: Tensor, matrix: Tensor) -> Tensor:
    """``F = C^-1 chi`` of a single sample (n, n), the unit matrix where chi is not positive definite."""
    unit = torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
    if not bool(is_definite(covariance, variance, matrix)):
        return unit
    amputated, _ = differentiable_response(covariance, variance, matrix)
    return unit + times_blocks(amputated, covariance)[0]

"""The entry for spins: means, covariances and cavity variances of coupled vector sites."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solvers.adjoints.kinds import Adjoint, Implicit
from solvers.core.modes import eager, without_autocast
from solvers.core.solution import Solution, Status, apply_policy, check_on_failure
from solvers.core.tolerance import Tolerance
from solvers.fixed_points import fixed_point
from solvers.spins.maps import (
    SpinState,
    as_matrix,
    as_wide,
    cavity_field,
    naive_step,
    starting_state,
    tap_step,
    with_symmetries,
)
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
        response: (B, N, d, N, d) ``chi = (Lambda - J)^-1``, or None where it was not asked for.

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
    r"""Means and covariances of coupled sites by the adaptive TAP equations.

    For ``P(S) ~ prod_i rho(S_i) exp(1/2 sum_ij S_i^T J_ij S_j + sum_i x_i.S_i)`` find, sample by
    sample, means m and cavity variances V with::

        h_i = x_i + sum_j J_ij m_j - V_i m_i,   m_i = site mean,  C_i = site covariance at (h_i, V_i)
        Lambda_i = V_i + C_i^-1,   chi = (Lambda - J)^-1,   [chi]_ii = C_i

    This is exact for Gaussian sites. The joint map (:func:`solvers.spins.tap_step`) is solved by
    :func:`solvers.fixed_point` with :class:`solvers.AdaptiveTAP`, from a point where ``chi`` is positive
    definite; every further point is one too. Gradients reach couplings, field and the parameters
    of the site by implicit differentiation of the joint fixed point.

    Args:
        couplings: ``J`` (N, N, d, d), zero blocks ``J_ii``, ``J_ij^{ab} = J_ji^{ba}``. Its gradient has
            the same symmetry and the same zeros.
        field: ``x`` (B, N, d), dtype and device like ``couplings``.
        site: what a single site is, for example ``IsingSite()``.
        damping: None: automatic; a number in (0, 1]: plain steps of that length.
        tolerance: of the joint fixed point; None: rtol 1e-10 in float64, 1e-5 in float32.
        max_steps: evaluations per sample, an upper bound; for a site whose covariance does not depend on
            the field, of the variances and again of the means (``trace`` is that of the means).
        adjoint: as for :func:`solvers.fixed_point`; None: no gradients. ``Unrolled`` takes ``chi C^-1``
            for constant at each step: its gradient is the solution's up to the size of the residual.
        mask: (B, N) bool, sites that count; the others influence nobody, and their results are zero.
        onsager: False: the naive mean field, V = 0.
        response: return ``chi`` too. This is what the literature calls the linear response: the
            estimate of the correlations ``<S_i S_j> - <S_i><S_j>``, with ``[chi]_ii = C_i``. It is
            ``dm_i/dx_j`` at fixed V; the derivative of the solution itself, V's change included, is
            what autograd gives. With ``onsager=False`` it is ``dm_i/dx_j`` without reservation; the
            naive means may converge where ``chi`` is indefinite, which is looked at only here.
        record: keep the trace of residuals.
        on_failure: "warn", "raise" or "ignore" about samples that did not converge.

    Returns:
        A :class:`Solution` whose ``value`` is a :class:`SpinMarginals`. ``Status.INDEFINITE``: no
        further point with a positive definite ``chi`` was found, as where the model does not exist
        (Gaussian sites, ``Sigma^-1 - J`` indefinite) or the couplings are too strong for a consistent
        solution; the last consistent point is returned, and where there is none the starting point,
        with an infinite residual and, as ``response``, the uncoupled covariances. Nothing is NaN.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.

    Source: Opper and Winther (2001), "Adaptive and self-averaging Thouless-Anderson-Palmer mean-field
    theory for probabilistic modeling", Phys. Rev. E 64, 056131.
    """
    _check(couplings, field, site, mask, {"onsager": onsager, "response": response})
    check_on_failure(on_failure)
    model = _Model(with_symmetries(couplings), field, site, mask)
    options = {
        "solver": AdaptiveTAP(damping=damping),
        "tolerance": Tolerance(_RTOL.get(field.dtype, 1e-2)) if tolerance is None else tolerance,
        "max_steps": max_steps,
        "adjoint": adjoint,
        "record": record,
        "on_failure": "ignore",
    }
    if not onsager:
        solution = model.solve_naive(options)
    elif site.field_dependent or mask is not None:
        solution = model.solve(options)
    else:
        solution = model.solve_shared(options)
    with torch.set_grad_enabled(adjoint is not None and torch.is_grad_enabled()):
        model.complete(solution, response)
    apply_policy(
        solution, on_failure, "adaptive TAP solve" if onsager else "mean-field solve", stacklevel=4
    )
    return solution


@dataclass
class _Model:
    couplings: Tensor
    field: Tensor
    site: Site
    mask: Tensor | None

    def solve(self, options: dict[str, Any]) -> Solution:
        """The joint fixed point of every sample."""
        start = starting_state(self.field, self.couplings, self.site, self.mask)

        def step(state: SpinState, field: Tensor, mask: Tensor | None) -> SpinState:
            return tap_step(state, field, self.couplings, self.site, mask)

        return fixed_point(step, start, (self.field, self.mask), mask=self.mask, **options)

    def solve_naive(self, options: dict[str, Any]) -> Solution:
        """The fixed point of the means at V = 0; ``value`` becomes a state like the others'."""

        def step(mean: Tensor, field: Tensor, mask: Tensor | None) -> Tensor:
            return naive_step(mean, field, self.couplings, self.site, mask)

        start = torch.zeros_like(self.field)
        solution = fixed_point(step, start, (self.field, self.mask), mask=self.mask, **options)
        variance = start.new_zeros(()).expand(*start.shape, start.shape[-1])
        solution.value = SpinState(solution.value, variance)
        return solution

    def solve_shared(self, options: dict[str, Any]) -> Solution:
        """Cavity variances once for all samples, then the means, which depend on them linearly."""
        alone = replace(self, field=self.field.new_zeros(1, *self.field.shape[1:]))
        first = alone.solve(options)
        variance = first.value.cavity_variance
        exists = bool(torch.isfinite(first.residual).all())
        with torch.no_grad(), without_autocast(self.field.device.type):
            wide = as_wide(variance)
            covariance = self.site.covariance(as_wide(alone.field), wide)
            towards = _towards(covariance, wide, as_wide(as_matrix(self.couplings)))

        def step(mean: Tensor, field: Tensor) -> Tensor:
            if not exists:  # stay at the starting point
                return 0.0 * (mean + field)
            with without_autocast(mean.device.type):
                m, x, j = (as_wide(t) for t in (mean, field, as_matrix(self.couplings)))
                v = as_wide(variance)
                h = cavity_field(SpinState(m, v), x, j, None)
                residual = self.site.mean(h, v) - m
                return (m + (residual.flatten(1) @ towards).view_as(m)).to(mean.dtype)

        solution = fixed_point(step, torch.zeros_like(self.field), (self.field,), **options)
        solution.status = torch.where(first.converged, solution.status, first.status)
        solution.residual = torch.maximum(solution.residual, first.residual)
        solution.residual_norm = torch.maximum(solution.residual_norm, first.residual_norm)
        solution.steps = solution.steps + first.steps
        solution.evaluations = solution.evaluations + first.evaluations
        solution.value = SpinState(solution.value, variance)
        return solution

    def complete(self, solution: Solution, response: bool) -> None:
        """Turn the solved state into :class:`SpinMarginals`."""
        with without_autocast(self.field.device.type):
            mean, covariance, variance, whole = self._marginals(solution, response)
        dtype = self.field.dtype
        whole = None if whole is None else whole.to(dtype)
        solution.value = SpinMarginals(
            mean.to(dtype), covariance.to(dtype), variance.to(dtype), whole
        )

    def _marginals(
        self, solution: Solution, response: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The same, in the precision of the factorisations."""
        state = SpinState(*(as_wide(t) for t in solution.value))
        mean, variance = state
        matrix = as_wide(as_matrix(self.couplings))
        field = cavity_field(state, as_wide(self.field), matrix, self.mask)
        covariance = self.site.covariance(field, variance)
        if self.mask is not None:
            covariance = torch.where(self.mask[..., None, None], covariance, 0.0)
            mean = torch.where(self.mask.unsqueeze(-1), mean, 0.0)
            variance = torch.where(self.mask[..., None, None], variance, 0.0)
        whole: Tensor | None = None
        if response:
            whole = self._response(solution, covariance, state.cavity_variance, matrix)
            whole = whole.expand(len(mean), *whole.shape[1:])
        covariance, variance = (t.expand(len(mean), *t.shape[1:]) for t in (covariance, variance))
        return mean, covariance, variance, whole

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
        whole = covariance.unsqueeze(3) * unit[:, None, :, None]
        rows = torch.nonzero(definite).flatten()
        part = covariance[rows]
        amputated, _ = differentiable_response(part, variance[rows], matrix)
        right = times_blocks(amputated, part).view(len(rows), sites, dim, sites * dim)
        through = (part @ right).view(len(rows), sites, dim, sites, dim)
        return whole.index_add(0, rows, through)


def _towards(covariance: Tensor, variance: Tensor, matrix: Tensor) -> Tensor:
    """``F = C^-1 chi`` of a single sample (n, n), the unit matrix where chi is not positive definite."""
    unit = torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
    if not bool(is_definite(covariance, variance, matrix)):
        return unit
    amputated, _ = differentiable_response(covariance, variance, matrix)
    return unit + times_blocks(amputated, covariance)[0]


def _check(couplings: Any, field: Any, site: Any, mask: Any, flags: dict[str, Any]) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    if not isinstance(site, Site):
        raise TypeError(f"site must be a solvers.Site such as IsingSite(), got {site!r}")
    for name, value in (("couplings", couplings), ("field", field)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            what = value.dtype if isinstance(value, Tensor) else type(value)
            raise TypeError(f"{name} must be a floating tensor, got {what}")
    if field.dim() != 3 or 0 in field.shape:
        raise ValueError(
            f"field must have the shape (B, N, d), none of them 0, got {tuple(field.shape)}"
        )
    _, sites, dim = field.shape
    if tuple(couplings.shape) != (sites, sites, dim, dim):
        raise ValueError(
            f"couplings must have the shape (N, N, d, d) = {(sites, sites, dim, dim)} to go with field "
            f"{tuple(field.shape)}, got {tuple(couplings.shape)}"
        )
    if couplings.dtype != field.dtype or couplings.device != field.device:
        raise TypeError(
            f"couplings must be like field, {field.dtype} on {field.device}, got {couplings.dtype} on "
            f"{couplings.device}"
        )
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"mask must be a bool tensor (B, N), got {mask!r}")
        if mask.shape != field.shape[:2]:
            raise ValueError(
                f"mask must have the shape {tuple(field.shape[:2])}, got {tuple(mask.shape)}"
            )
    _check_values(couplings.detach(), field.detach())


def _check_values(couplings: Tensor, field: Tensor) -> None:
    """Finite, without self-coupling, symmetric; on a GPU this waits for the device once a solve."""
    finite = torch.isfinite(field).flatten(1).all(1)
    if not bool(finite.all()):
        rows = torch.nonzero(~finite).flatten().tolist()
        raise ValueError(f"field must be finite, got NaN or infinity in samples {rows[:10]}")
    if not bool(torch.isfinite(couplings).all()):
        raise ValueError("couplings must be finite, got NaN or infinity")
    own = couplings.diagonal(dim1=0, dim2=1).abs().amax((0, 1))
    if bool(own.any()):
        site = int(own.argmax())
        raise ValueError(
            f"couplings must have zero diagonal blocks (no site couples to itself), got "
            f"{float(own[site])} in couplings[{site}, {site}]"
        )
    apart = (couplings - couplings.permute(1, 0, 3, 2)).abs().amax((2, 3))
    allowed = 32 * torch.finfo(couplings.dtype).eps * couplings.abs().max()
    if bool((apart > allowed).any()):
        first, second = divmod(int(apart.argmax()), len(apart))
        raise ValueError(
            "couplings must be symmetric, J_ij^ab = J_ji^ba, got a difference of "
            f"{float(apart.max())} between couplings[{first}, {second}] and the transpose of "
            f"couplings[{second}, {first}]; use (J + J.permute(1, 0, 3, 2)) / 2"
        )

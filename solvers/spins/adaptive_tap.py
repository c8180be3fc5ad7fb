r"""Means, covariances and free energies of coupled vector sites: naive, second-order and adaptive TAP theory.

With means m, cavity variances V, covariances C, couplings J, the cavity fields
``h_i = x_i + sum_j J_ij m_j - V_i m_i`` and the response ``chi = (C^-1 + V - J)^-1``, all theories share::

    F(m, V) = sum_i log Z_i(h_i, V_i) + 1/2 sum_i m_i^T V_i m_i - 1/2 sum_ij m_i^T J_ij m_j

    naive      log Z = F(m, 0)
    second     log Z = F(m, V) - 1/2 sum_i tr(C_i V_i) + 1/4 sum_ij tr(J_ij C_j J_ji C_i)
    adaptive   log Z = F(m, V) - 1/2 log det(I + C (V - J))

Each is stationary in m, V and C at the solution of its theory. Its derivative along anything else is
therefore the partial one, which takes no adjoint solve::

    d log Z / dx_i = m_i,   d log Z / dJ_ij = m_i m_j^T + { 0 | C_i J_ij C_j | chi_ij }

"second" is the expansion of Plefka for sites of which V changes the weights alone (Ising, Potts), and agrees
with it to second order in J for others. A *masked* site is one whose entry in ``mask`` is False.

Source: Opper and Winther (2001), "Adaptive and self-averaging Thouless-Anderson-Palmer mean-field
theory for probabilistic modeling", https://doi.org/10.1103/PhysRevE.64.056131; Plefka (1982),
"Convergence condition of the TAP equation for the infinite-ranged Ising spin glass model",
https://doi.org/10.1088/0305-4470/15/6/035; Thouless, Anderson, Palmer (1977), "Solution of 'Solvable
model of a spin glass'", https://doi.org/10.1080/14786437708235992.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from solvers.adjoints.kinds import Adjoint, Implicit
from solvers.core.checks import (
    require_choice,
    require_count,
    require_flag,
    require_instance,
    require_number,
)
from solvers.core.device import maybe_any
from solvers.core.loop import Solver, Turn
from solvers.core.modes import eager, without_autocast
from solvers.core.problem import Problem
from solvers.core.rows import Point, where_rows
from solvers.core.solution import Solution, Status, Tolerance, apply_policy, check_on_failure
from solvers.fixed_points import fixed_point
from solvers.methods.anderson import Anderson, Lists, Ring
from solvers.spins.inputs import (
    as_matrix,
    as_wide,
    check_inputs,
    no_variance,
    read_betas,
    read_given,
    read_start,
    stationary_value,
    usual_tolerance,
    with_dimensions,
    with_symmetries,
    zero_masked,
)
from solvers.spins.response import (
    differentiable_response,
    is_definite,
    linear_response,
    log_det,
    newton_step,
    times_blocks,
)
from solvers.spins.sites import PottsSite, Site, read_site

# Cavity variances that a start tries, in units of the largest eigenvalue of the couplings.
LEVELS = (0.0, 0.25, 0.5, 1.0)


class SpinState(NamedTuple):
    """Means (B, N, d) and cavity variances (B, N, d, d) of N sites."""

    mean: Tensor
    cavity_variance: Tensor


def cavity_field(
    mean: Tensor, variance: Tensor | None, field: Tensor, matrix: Tensor, mask: Tensor | None
) -> Tensor:
    """``h_i = x_i + sum_j J_ij m_j - V_i m_i``, j not masked, (B, N, d); None for V = 0."""
    total = field + (zero_masked(mean, mask).flatten(1) @ matrix).view_as(mean)
    return total if variance is None else total - (variance @ mean.unsqueeze(-1)).squeeze(-1)


def tap_step(
    state: SpinState, field: Tensor, couplings: Tensor, site: Site, mask: Tensor | None = None
) -> SpinState:
    r"""One step of adaptive TAP on means m and cavity variances V.

    With the cavity field ``h_i = x_i + sum_j J_ij m_j - V_i m_i``, the site's mean ``mu_i`` and
    covariance ``C_i`` at ``(h_i, V_i)``, and the response ``chi = (C^-1 + V - J)^-1``::

        m <- m + chi C^-1 (mu - m),   V_i <- V_i + C_i^-1 - [chi]_ii^-1

    The first is Newton's step for ``m = mu`` at fixed V; the second is ``Lambda_i - [chi]_ii^-1`` with
    ``Lambda_i = V_i + C_i^-1``. The fixed points have ``m = mu`` and ``[chi]_ii = C_i``.

    Under differentiation the matrix ``chi C^-1`` is a constant. At a fixed point its derivative is
    multiplied by ``mu - m = 0``, so implicit derivatives of any order are exact.

    Args:
        state: means (B, N, d), cavity variances (B, N, d, d), symmetric.
        field: (B, N, d).
        couplings: (N, N, d, d), zero diagonal blocks, symmetric as a matrix; not checked.
        site: the sites' distribution.
        mask: (B, N) bool, False for masked sites, which influence no other.

    Returns:
        The next state; NaN in samples where ``chi`` is not positive definite.

    Source: Opper and Winther (2001), eqs. 22-24 and 36-40, https://doi.org/10.1103/PhysRevE.64.056131.
    """
    with without_autocast(state.mean.device.type):
        x, j = as_wide(field), as_matrix(couplings)
        m, v = as_wide(state.mean), as_wide(state.cavity_variance)
        mu, covariance = site.moments(cavity_field(m, v, x, j, mask), v)
        # A site of zero covariance does not respond.
        covariance, residual = zero_masked(covariance, mask), zero_masked(mu - m, mask)
        if torch.is_grad_enabled():
            q, variance = differentiable_response(covariance, v, j)
            product = times_blocks(q.detach(), covariance.detach()).mT  # C Q, chi C^-1 = I + C Q
            step = (product @ residual.flatten(1).unsqueeze(-1)).view_as(residual)
            mean = m + residual + step
        else:
            step, change = newton_step(residual, covariance, v, j)
            mean, variance = m + step, v + change
    return SpinState(mean.to(state.mean.dtype), variance.to(state.cavity_variance.dtype))


def onsager_variance(covariance: Tensor, matrix: Tensor) -> Tensor:
    """``sum_j J_ij C_j J_ji``, (B, N, d, d), J as a matrix (n, n)."""
    batch, sites, dim = covariance.shape[:3]
    rows = matrix.view(sites, dim, sites, dim).permute(0, 2, 1, 3).reshape(-1, sites, dim, dim)
    pulled = rows @ covariance.unsqueeze(1)  # J_ij C_j, (B, N, N, d, d)
    left = pulled.permute(0, 1, 3, 2, 4).reshape(batch, sites, dim, sites * dim)
    right = matrix.view(sites, dim, sites * dim)  # J_ij again: J_ji is its transpose
    return left @ right.mT


def starting_state(
    field: Tensor, couplings: Tensor, site: Site, mask: Tensor | None = None
) -> SpinState:
    """Means 0 and the smallest ``V = v I`` tried for which ``chi`` is positive definite.

    Tried are v = 0, a quarter, a half and all of the largest eigenvalue of J; at the last one ``chi``
    is positive definite wherever the sites exist. A sample without one keeps V = 0; its solve then ends
    at once. Arguments: as for :func:`tap_step`.
    """
    with torch.no_grad(), without_autocast(field.device.type):
        x, matrix = as_wide(field.detach()), as_matrix(couplings.detach())
        mean, variance = torch.zeros_like(x), no_variance(x).clone()
        unit = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        rows = torch.arange(len(x), device=x.device)
        finite = torch.where(matrix.isfinite(), matrix, 0.0)  # LAPACK raises at a NaN
        largest = torch.linalg.eigvalsh(finite)[-1].clamp_min(0.0)
        for level in LEVELS:
            tried = (level * largest * unit).expand(len(rows), *variance.shape[1:])
            covariance = site.moments(x[rows], tried)[1]
            covariance = covariance.expand(len(rows), *covariance.shape[1:])
            covariance = zero_masked(covariance, None if mask is None else mask[rows])
            # |C| |J| < 1 takes no factorisation; False where a covariance is NaN.
            size = covariance.abs().sum(-1).flatten(1).amax(1)
            definite = size * ((1 - level) * largest) < 1
            if not bool(definite.all()):
                definite = definite | is_definite(covariance, tried, matrix)
            variance[rows[definite]] = tried[definite]
            rows = rows[~definite]
            if rows.numel() == 0:
                break
    return SpinState(mean.to(field.dtype), variance.to(field.dtype))


GROWTH = 3.0  # of the residual over its best, beyond which a step is damped
SMALLEST = 0.125  # damping factor


@dataclass(frozen=True)
class AdaptiveTAP(Solver):
    """Anderson acceleration for the adaptive TAP equations, damped where the residual grows.

    A step to where the response ``chi`` is not positive definite is halved until it is. Where that
    happens, or the residual has grown to three times its best, the sample drops its Anderson history and
    makes a damped step ``z + t (f(z) - z)``. Its ``t`` is halved each time, down to 1/8, and grows by a
    fifth in every other step. A sample without a positive definite ``chi`` is ``Status.INDEFINITE``.

    :func:`solvers.adaptive_tap` uses it, and so does a layer:
    ``DEQ(AdaptiveTAPAttention(...), solver=AdaptiveTAP())``.

    Args:
        damping: None: as above; a number in (0, 1]: damped steps with this ``t`` alone.
        memory: earlier iterates that Anderson acceleration uses, >= 1.
    """

    damping: float | None = None
    memory: int = 6

    lost: ClassVar[Status] = Status.INDEFINITE

    def __post_init__(self) -> None:
        if self.damping is not None:
            require_number("damping", self.damping, low=0.0, high=1.0, closed=False)
        require_count("memory", self.memory)

    def init(self, point: Point, problem: Problem) -> TAPState:
        anderson = Anderson(memory=self.memory)
        return TAPState(
            accelerated=anderson.init(point, problem) if self.damping is None else None,
            damping=torch.ones_like(point.norm),
            best=torch.full_like(point.norm, torch.inf),
        )

    def step(self, state: TAPState, turn: Turn) -> Tensor:
        current = turn.current
        if state.accelerated is None:
            return current.z.add(current.residual, alpha=self.damping or 1.0)
        candidate = Anderson(memory=self.memory).step(state.accelerated, turn)
        worse = current.norm > GROWTH * state.best
        if turn.accepted is not None:
            worse = worse | ~turn.accepted
        smaller = (state.damping / 2).clamp_min(SMALLEST)
        state.damping = torch.where(worse, smaller, (1.2 * state.damping).clamp_max(1.0))
        state.best = torch.where(worse, current.norm, torch.minimum(current.norm, state.best))
        if not maybe_any(worse):
            return candidate
        state.accelerated.forget(worse)
        damped = current.z + state.damping[:, None].to(current.z.dtype) * current.residual
        return where_rows(worse, damped, candidate)


@dataclass
class TAPState:
    """``damping`` (B,) of the next damped step, ``best`` (B,) residual norm of the current history."""

    accelerated: Ring | Lists | None
    damping: Tensor
    best: Tensor


class CoupledSites(NamedTuple):
    """Checked couplings (N, N, d, d) of sites in their fields (B, N, d), and a mask (B, N) or None."""

    couplings: Tensor
    field: Tensor
    site: Site
    mask: Tensor | None


def solve_theory(
    order: str, model: CoupledSites, start: SpinState | None, options: dict[str, Any]
) -> Solution:
    """The solution of a theory as a :class:`SpinState`; ``start`` None for its own start, options of
    :func:`solvers.fixed_point`."""
    couplings, field, site, mask = model

    def naive_step(mean: Tensor, field: Tensor, mask: Tensor | None) -> Tensor:
        with without_autocast(mean.device.type):
            m, x, j = as_wide(mean), as_wide(field), as_matrix(couplings)
            return site.mean(cavity_field(m, None, x, j, mask), no_variance(m)).to(mean.dtype)

    def second_step(state: SpinState, field: Tensor, mask: Tensor | None) -> SpinState:
        with without_autocast(field.device.type):
            x, j = as_wide(field), as_matrix(couplings)
            m, v = as_wide(state.mean), as_wide(state.cavity_variance)
            mu, covariance = site.moments(cavity_field(m, v, x, j, mask), v)
            variance = onsager_variance(zero_masked(covariance, mask), j).expand_as(v)
        return SpinState(mu.to(state.mean.dtype), variance.to(state.cavity_variance.dtype))

    def adaptive_step(state: SpinState, field: Tensor, mask: Tensor | None) -> SpinState:
        return tap_step(state, field, couplings, site, mask)

    options = options | {"args": (field, mask), "mask": mask}
    if order == "adaptive":
        return fixed_point(adaptive_step, _definite(start, model), **options)
    if start is None:
        start = SpinState(torch.zeros_like(field), no_variance(field).clone())
    if order == "second":
        return fixed_point(second_step, start, **options)
    solution = fixed_point(naive_step, start.mean, **options)
    solution.value = SpinState(solution.value, no_variance(field))
    return solution


def _definite(start: SpinState | None, model: CoupledSites) -> SpinState:
    """``start``, but the usual one in samples where its ``chi`` is not positive definite."""
    couplings, field, site, mask = model
    if start is None:
        return starting_state(field, couplings, site, mask)
    with torch.no_grad(), without_autocast(field.device.type):
        mean, variance = (as_wide(t) for t in start)
        matrix = as_matrix(couplings)
        h = cavity_field(mean, variance, as_wide(field), matrix, mask)
        covariance = zero_masked(site.covariance(h, variance), mask)
        definite = is_definite(covariance, variance, matrix)
    if bool(definite.all()):
        return start
    usual, chosen = starting_state(field, couplings, site, mask), definite[:, None, None]
    return SpinState(
        torch.where(chosen, start.mean, usual.mean),
        torch.where(chosen[..., None], start.cavity_variance, usual.cavity_variance),
    )


ORDERS = ("naive", "second", "adaptive")
State = tuple[Tensor, Tensor, Tensor]  # means, cavity variances, covariances


def tap_log_partition(
    state: SpinState,
    field: Tensor,
    couplings: Tensor,
    site: Site,
    mask: Tensor | None = None,
    *,
    order: str = "adaptive",
) -> Tensor:
    """``log Z`` of coupled sites at the solution of a mean-field theory, differentiable.

    A gradient costs no adjoint solve: ``d log Z / dx = m``. It reaches field, couplings and the parameters
    of the site, also where ``state`` was computed without gradients; second derivatives go through
    ``state``. A pair counts once: its gradient holds ``(m_i m_j^T + ...) / 2`` in the block ``[i, j]``.

    Args:
        state: the solution of the theory, means (B, N, d) and cavity variances (B, N, d, d).
        field: ``x`` (B, N, d).
        couplings: ``J`` (N, N, d, d), as for :func:`solvers.adaptive_tap`.
        site: the sites' distribution.
        mask: (B, N) bool, False for masked sites, which are left out.
        order: the theory, "naive", "second" or "adaptive".

    Returns:
        (B,), at least float32; 0 without couplings and fields. Of order "adaptive" it is NaN, and adds
        nothing to gradients, in samples whose ``chi`` is not positive definite, as a solution's always is.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument.

    Source: :mod:`solvers.spins.adaptive_tap`.
    """
    require_choice("order", order, ORDERS)
    require_instance("site", site, Site, "a solvers.Site such as IsingSite()")
    check_inputs(couplings, field, mask)
    with without_autocast(field.device.type):
        mean, variance = (as_wide(t) for t in state)
        matrix = as_matrix(with_symmetries(couplings))
        h = cavity_field(mean, variance, as_wide(field), matrix, mask)
        covariance = zero_masked(site.covariance(h, variance), mask)
        results = (zero_masked(mean, mask), zero_masked(variance, mask), covariance)
        value, exists = free_energy(order, results, as_wide(field), matrix, site, mask)
        return torch.where(exists, value, torch.nan)


def free_energy(
    order: str, state: State, field: Tensor, matrix: Tensor, site: Site, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``log Z`` (B,) and where it exists (B,) bool; elsewhere it lacks the term with the determinant.

    ``state`` is zero at masked sites; ``matrix`` (n, n).
    """
    definite = torch.ones(len(field), dtype=torch.bool, device=field.device)
    if order == "adaptive":
        with torch.no_grad():
            definite = is_definite(state[2], state[1], matrix)

    def value(args: tuple[Tensor, Tensor], state: State) -> Tensor:
        mean, variance, covariance = state
        field, matrix = args
        flat = mean.flatten(1)
        if order == "naive":
            variance = no_variance(mean)
        h = cavity_field(mean, variance, field, matrix, None)
        own = zero_masked(site.log_partition(h, variance), mask).sum(1)
        found = own - (flat * (flat @ matrix)).sum(1) / 2
        if order == "naive":
            return found
        found = found + (mean * (variance @ mean.unsqueeze(-1)).squeeze(-1)).flatten(1).sum(1) / 2
        if order == "second":
            onsager = onsager_variance(covariance, matrix)
            return found + (covariance * (onsager / 4 - variance / 2)).flatten(1).sum(1)
        covariance = torch.where(definite[:, None, None, None], covariance, 0.0)
        return found - log_det(covariance, variance, matrix) / 2

    return stationary_value(value, (field, matrix), state), definite


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
        log_partition: return ``log Z`` too, for priors of weight 1 (:mod:`solvers.spins.adaptive_tap`
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

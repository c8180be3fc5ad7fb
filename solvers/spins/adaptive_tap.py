r"""Mean-field theories of coupled vector sites: naive mean field, second-order TAP and adaptive TAP.

With means m, cavity variances V, covariances C, couplings J, the cavity fields
``h_i = x_i + sum_j J_ij m_j - V_i m_i`` and the response ``chi = (C^-1 + V - J)^-1``, all theories share::

    F(m, V) = sum_i log Z_i(h_i, V_i) + 1/2 sum_i m_i^T V_i m_i - 1/2 sum_ij m_i^T J_ij m_j

    naive      log Z = F(m, 0)
    second     log Z = F(m, V) - 1/2 sum_i tr(C_i V_i) + 1/4 sum_ij tr(J_ij C_j J_ji C_i)
    adaptive   log Z = F(m, V) - 1/2 log det(I + C (V - J))

Each is stationary in m, V and C at the solution of its theory. Its total derivatives with respect to other
quantities therefore equal the partial ones and need no adjoint solve::

    d log Z / dx_i = m_i,   d log Z / dJ_ij = m_i m_j^T + { 0 | C_i J_ij C_j | chi_ij }

"second" is Plefka's expansion for sites where V only changes the weights (Ising, Potts), and agrees
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

from solvers.adjoint import Adjoint
from solvers.core.checks import (
    require_choice,
    require_count,
    require_flag,
    require_instance,
    require_number,
)
from solvers.core.loop import Solver, SolverInput
from solvers.core.modes import eager, without_autocast
from solvers.core.problem import Problem, Sharing
from solvers.core.rows import Evaluation, where_rows
from solvers.core.solution import Solution, Status, apply_policy, check_on_failure
from solvers.core.tolerance import Tolerance
from solvers.fixed_points import fixed_point
from solvers.methods.anderson import Anderson, Differences
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
    is_definite,
    linear_response,
    log_det,
    newton_step,
    next_variance,
)
from solvers.spins.sites import PottsSite, Site, read_site

# Candidate cavity variances of the start, in units of the largest eigenvalue of the couplings.
LEVELS = (0.0, 0.25, 0.5, 1.0)


class SpinState(NamedTuple):
    """Means (B, N, d) and cavity variances (B, N, d, d) of N sites."""

    mean: Tensor
    cavity_variance: Tensor


class CoupledSites(NamedTuple):
    """Sites in fields (B, N, d), coupled by J as a matrix (n, n), and a mask (B, N) or None.

    The tensors have at least single precision.
    """

    matrix: Tensor
    field: Tensor
    site: Site
    mask: Tensor | None

    def cavity_field(self, mean: Tensor, variance: Tensor | None) -> Tensor:
        """Return ``h_i = x_i + sum_j J_ij m_j - V_i m_i`` over unmasked j, (B, N, d); None means V = 0."""
        pull = zero_masked(mean, self.mask).flatten(1) @ self.matrix
        total = self.field + pull.view_as(mean)
        return total if variance is None else total - (variance @ mean.unsqueeze(-1)).squeeze(-1)

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and covariances of the sites in their cavity fields.

        A masked site has zero covariance, so it does not respond.
        """
        found, covariance = self.site.moments(self.cavity_field(mean, variance), variance)
        return found, zero_masked(covariance, self.mask)

    def onsager_variance(self, covariance: Tensor) -> Tensor:
        """Return ``sum_j J_ij C_j J_ji``, (B, N, d, d)."""
        batch, sites, dim = covariance.shape[:3]
        rows = self.matrix.view(sites, dim, sites, dim).transpose(1, 2)
        pulled = rows @ covariance.unsqueeze(1)  # J_ij C_j, (B, N, N, d, d)
        left = pulled.permute(0, 1, 3, 2, 4).reshape(batch, sites, dim, sites * dim)
        right = self.matrix.view(sites, dim, sites * dim)  # J_ij again: J_ji is its transpose
        return left @ right.mT


def tap_step(
    state: SpinState, field: Tensor, couplings: Tensor, site: Site, mask: Tensor | None = None
) -> SpinState:
    r"""Return the next means m and cavity variances V of adaptive TAP.

    With the cavity field ``h_i = x_i + sum_j J_ij m_j - V_i m_i``, the site's mean ``mu_i`` and
    covariance ``C_i`` at ``(h_i, V_i)``, and the response ``chi = (C^-1 + V - J)^-1``::

        m <- m + chi C^-1 (mu - m),   V_i <- V_i + C_i^-1 - [chi]_ii^-1

    The first is Newton's step for ``m = mu`` at fixed V. The fixed points satisfy ``m = mu`` and
    ``[chi]_ii = C_i``. Differentiation treats the matrix ``chi C^-1`` as constant. At a fixed point its
    derivative is multiplied by ``mu - m = 0``, so implicit derivatives of any order are exact.

    Args:
        state: means (B, N, d) and symmetric cavity variances (B, N, d, d).
        field: (B, N, d).
        couplings: (N, N, d, d) with zero diagonal blocks, symmetric as a matrix (not checked).
        site: site distribution.
        mask: (B, N) bool, False for masked sites, which do not influence others.

    Returns:
        The next state, NaN in samples where ``chi`` is not positive definite.

    Source: Opper and Winther (2001), eqs. 22-24 and 36-40, https://doi.org/10.1103/PhysRevE.64.056131.
    """
    with without_autocast(state.mean.device.type):
        model = CoupledSites(as_matrix(couplings), as_wide(field), site, mask)
        mean, variance = _adaptive_step(as_wide(state[0]), as_wide(state[1]), model)
    return SpinState(mean.to(state.mean.dtype), variance.to(state.cavity_variance.dtype))


def _adaptive_step(mean: Tensor, variance: Tensor, model: CoupledSites) -> SpinState:
    own, covariance = model.moments(mean, variance)
    residual = zero_masked(own - mean, model.mask)
    if torch.is_grad_enabled():
        later, matrix = next_variance(covariance, variance, model.matrix)
        step = (matrix.mT @ residual.flatten(1).unsqueeze(-1)).view_as(
            residual
        )  # chi C^-1 (mu - m)
        return SpinState(mean + step, later)
    step, change = newton_step(residual, covariance, variance, model.matrix)
    return SpinState(mean + step, variance + change)


def starting_state(
    field: Tensor, couplings: Tensor, site: Site, mask: Tensor | None = None
) -> SpinState:
    """Return means 0 and the smallest candidate ``V = v I`` for which ``chi`` is positive definite.

    The candidates are 0, 1/4, 1/2 and 1 times the largest eigenvalue of J; at the last one ``chi`` is
    positive definite if the sites exist. A sample without a valid candidate keeps V = 0, and its solve
    ends immediately. Arguments are those of :func:`tap_step`.
    """
    with torch.no_grad(), without_autocast(field.device.type):
        model = CoupledSites(as_matrix(couplings), as_wide(field), site, mask)
        mean, variance = _usual_start(model)
    return SpinState(mean.to(field.dtype), variance.to(field.dtype))


def _usual_start(model: CoupledSites) -> SpinState:
    x, matrix = model.field, model.matrix
    mean, variance = torch.zeros_like(x), no_variance(x).clone()
    unit = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    finite = torch.where(matrix.isfinite(), matrix, 0.0)  # LAPACK raises at a NaN
    largest = torch.linalg.eigvalsh(finite)[-1].clamp_min(0.0)
    ready = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for level in LEVELS:
        tried = (level * largest * unit).expand_as(variance)
        covariance = model.site.moments(x, tried)[1].expand_as(variance)
        covariance = zero_masked(covariance, model.mask)
        # |C| |J| < 1 takes no factorisation; False where a covariance is NaN.
        size = covariance.abs().sum(-1).flatten(1).amax(1)
        definite = size * ((1 - level) * largest) < 1
        if not bool((ready | definite).all()):
            definite = definite | is_definite(covariance, tried, matrix)
        variance = torch.where((definite & ~ready)[:, None, None, None], tried, variance)
        ready = ready | definite
        if bool(ready.all()):
            break
    return SpinState(mean, variance)


GROWTH = 3.0  # growth of the residual over its best beyond which a step is damped
SMALLEST = 0.125  # damping factor


@dataclass(frozen=True)
class AdaptiveTAP(Solver):
    """Anderson acceleration for the adaptive TAP equations, damped when the residual grows.

    A step to a point where the response ``chi`` is not positive definite is halved until it is. If that
    happens, or the residual grows to three times its best, the sample discards its Anderson history and
    makes a damped step ``z + t (f(z) - z)``. Each such step halves ``t``, down to 1/8, and every other
    step increases it by a fifth. A sample without a positive definite ``chi`` is ``Status.INDEFINITE``.

    :func:`solvers.adaptive_tap` uses it; layers can, too:
    ``DEQ(AdaptiveTAPAttention(...), solver=AdaptiveTAP())``.

    Args:
        damping: None for the rule above, or a fixed ``t`` in (0, 1] for damped steps only.
        memory: number of previous iterates in Anderson acceleration, >= 1.
    """

    damping: float | None = None
    memory: int = 6

    failed: ClassVar[Status] = Status.INDEFINITE

    def __post_init__(self) -> None:
        if self.damping is not None:
            require_number("damping", self.damping, low=0.0, high=1.0, closed=False)
        require_count("memory", self.memory)

    def init(self, point: Evaluation, problem: Problem) -> TAPState:
        anderson = Anderson(memory=self.memory)
        return TAPState(
            accelerated=anderson.init(point, problem) if self.damping is None else None,
            damping=torch.ones_like(point.norm),
            best=torch.full_like(point.norm, torch.inf),
        )

    def step(self, state: TAPState, inputs: SolverInput) -> Tensor:
        current = inputs.current
        if state.accelerated is None:
            return current.z.add(current.residual, alpha=self.damping or 1.0)
        candidate = Anderson(memory=self.memory).step(state.accelerated, inputs)
        worse = current.norm > GROWTH * state.best
        if inputs.accepted is not None:
            worse = worse | ~inputs.accepted
        smaller = (state.damping / 2).clamp_min(SMALLEST)
        state.damping = torch.where(worse, smaller, (1.2 * state.damping).clamp_max(1.0))
        state.best = torch.where(worse, current.norm, torch.minimum(current.norm, state.best))
        if not bool(worse.any()):
            return candidate
        state.accelerated.forget(worse)
        damped = current.z + state.damping[:, None].to(current.z.dtype) * current.residual
        return where_rows(worse, damped, candidate)


@dataclass
class TAPState:
    """``damping`` (B,) of the next damped step, ``best`` (B,) residual norm of the current history."""

    accelerated: Differences | None
    damping: Tensor
    best: Tensor


def solve_theory(
    order: str, model: CoupledSites, start: SpinState | None, options: dict[str, Any]
) -> Solution:
    """Solve a theory for its :class:`SpinState`, from ``start`` or the default start.

    ``options`` are those of :func:`solvers.fixed_point`.
    """
    site = model.site

    def naive_step(mean: Tensor, field: Tensor, mask: Tensor | None, matrix: Tensor) -> Tensor:
        h = CoupledSites(matrix, field, site, mask).cavity_field(mean, None)
        return site.mean(h, no_variance(mean))

    def second_step(
        state: SpinState, field: Tensor, mask: Tensor | None, matrix: Tensor
    ) -> SpinState:
        own = CoupledSites(matrix, field, site, mask)
        mean, covariance = own.moments(*state)
        return SpinState(mean, own.onsager_variance(covariance).expand_as(state.cavity_variance))

    def adaptive_step(
        state: SpinState, field: Tensor, mask: Tensor | None, matrix: Tensor
    ) -> SpinState:
        return _adaptive_step(*state, CoupledSites(matrix, field, site, mask))

    options = options | {"args": (model.field, model.mask), "mask": model.mask}
    if order == "adaptive":
        return fixed_point(
            Sharing(adaptive_step, model.matrix), _definite_start(start, model), **options
        )
    if start is None:
        start = SpinState(torch.zeros_like(model.field), no_variance(model.field).clone())
    if order == "second":
        return fixed_point(Sharing(second_step, model.matrix), start, **options)
    solution = fixed_point(Sharing(naive_step, model.matrix), start.mean, **options)
    solution.value = SpinState(solution.value, no_variance(model.field))
    return solution


@torch.no_grad()
def _definite_start(start: SpinState | None, model: CoupledSites) -> SpinState:
    """Return ``start``, replaced by the default in samples where its ``chi`` is not positive definite."""
    if start is None:
        return _usual_start(model)
    covariance = model.moments(*start)[1]
    definite = is_definite(covariance, start.cavity_variance, model.matrix)
    if bool(definite.all()):
        return start
    usual, chosen = _usual_start(model), definite[:, None, None]
    return SpinState(
        torch.where(chosen, start.mean, usual.mean),
        torch.where(chosen[..., None], start.cavity_variance, usual.cavity_variance),
    )


# What an error calls the solve of a theory.
ORDERS = {
    "naive": "mean-field solve",
    "second": "second-order TAP solve",
    "adaptive": "adaptive TAP solve",
}
State = tuple[Tensor, Tensor, Tensor]  # means, cavity variances, covariances


def tap_log_partition(
    state: SpinState, field: Tensor, couplings: Tensor, site: Site, mask: Tensor | None = None
) -> Tensor:
    """Return the differentiable ``log Z`` of coupled sites at a solution of adaptive TAP.

    Gradients need no adjoint solve: ``d log Z / dx = m``. They reach field, couplings and the parameters
    of the site even if ``state`` was computed without gradients; second derivatives go through ``state``.
    Each pair counts once, so the gradient of the block ``[i, j]`` is ``(m_i m_j^T + chi_ij) / 2``.

    Args:
        state: means (B, N, d) and cavity variances (B, N, d, d) at the solution.
        field: ``x`` (B, N, d).
        couplings: ``J`` (N, N, d, d), see :func:`solvers.adaptive_tap`.
        site: site distribution.
        mask: (B, N) bool, False for masked sites, which are excluded.

    Returns:
        (B,), at least float32; 0 without couplings and fields. It is NaN, without gradients, in samples
        whose ``chi`` is not positive definite; at a solution it always is.

    Raises:
        TypeError, ValueError: if an argument is invalid.

    Source: :mod:`solvers.spins.adaptive_tap`.
    """
    require_instance("site", site, Site, "a solvers.Site such as IsingSite()")
    check_inputs(couplings, field, mask)
    with without_autocast(field.device.type):
        matrix = as_matrix(with_symmetries(couplings))
        model = CoupledSites(matrix, as_wide(field), site, mask)
        mean, variance = (as_wide(t) for t in state)
        covariance = model.moments(mean, variance)[1]
        results = (zero_masked(mean, mask), zero_masked(variance, mask), covariance)
        value, exists = free_energy("adaptive", results, model)
        return torch.where(exists, value, torch.nan)


def free_energy(order: str, state: State, model: CoupledSites) -> tuple[Tensor, Tensor]:
    """Return ``log Z`` (B,) and whether it exists (B,) bool; otherwise it lacks the determinant.

    ``state`` is zero at masked sites.
    """
    definite = torch.ones(len(model.field), dtype=torch.bool, device=model.field.device)
    if order == "adaptive":
        with torch.no_grad():
            definite = is_definite(state[2], state[1], model.matrix)

    def value(args: tuple[Tensor, Tensor], state: State) -> Tensor:
        mean, variance, covariance = state
        field, matrix = args
        whole = model._replace(field=field, matrix=matrix)
        h = whole.cavity_field(mean, variance)
        own = zero_masked(model.site.log_partition(h, variance), model.mask)
        pairs = (mean.flatten(1) @ matrix).view_as(mean) - (variance @ mean.unsqueeze(-1)).squeeze(
            -1
        )
        found = own.sum(1) - (mean * pairs).flatten(1).sum(1) / 2
        if order == "naive":
            return found
        if order == "second":
            onsager = whole.onsager_variance(covariance)
            return found + (covariance * (onsager / 4 - variance / 2)).flatten(1).sum(1)
        covariance = torch.where(definite[:, None, None, None], covariance, 0.0)
        return found - log_det(covariance, variance, matrix) / 2

    return stationary_value(value, (model.field, model.matrix), state), definite


class SpinMarginals(NamedTuple):
    """Result of :func:`adaptive_tap`.

    Attributes:
        mean: (B, N, d).
        covariance: (B, N, d, d) of each site.
        cavity_variance: (B, N, d, d) ``V``; zero for the naive mean field.
        response: (B, N, d, N, d) ``chi``, or None without ``response=True``.
        log_partition: (B,) ``log Z``, at least float32, or None without ``log_partition=True``.
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
    adjoint: Adjoint | type[Adjoint] | str | None = "implicit",
    mask: Tensor | None = None,
    given: tuple[Tensor, Tensor] | None = None,
    start: SpinState | SpinMarginals | None = None,
    inverse_temperature: float | Sequence[float] = 1.0,
    response: bool = False,
    log_partition: bool = False,
    record: bool = False,
    on_failure: str = "warn",
) -> Solution:
    r"""Compute means, covariances and free energies of coupled sites by mean-field theories.

    For ``P(S) ~ prod_i rho(S_i) exp(1/2 sum_ij S_i^T J_ij S_j + sum_i x_i.S_i)`` solve for means m and
    cavity variances V::

        h_i = x_i + sum_j J_ij m_j - V_i m_i,   m_i = site mean,  C_i = site covariance at (h_i, V_i)

        order "adaptive":  Lambda_i = V_i + C_i^-1,   chi = (Lambda - J)^-1,   [chi]_ii = C_i
        order "second":    V_i = sum_j J_ij C_j J_ji
        order "naive":     V_i = 0

    The adaptive equations are exact for Gaussian sites; ``chi`` is positive definite at every iterate
    (:func:`solvers.tap_step`, :class:`solvers.AdaptiveTAP`). Gradients reach couplings, field, ``given``
    values and the parameters of the site by implicit differentiation.

    Args:
        couplings: ``J`` (N, N, d, d) with zero blocks ``J_ii`` and ``J_ij^{ab} = J_ji^{ba}``, or (N, N) if
            d = 1. Its gradient has the same symmetry and zeros.
        field: ``x`` (B, N, d) with the dtype and device of ``couplings``; for couplings (N, N) also (B, N),
            or (N,) for one sample. The results have all dimensions.
        site: distribution of a single site, for example ``IsingSite()``, or its name: "ising", "potts",
            "spherical", "torus".
        order: "adaptive", "second" (the TAP equations to second order in the couplings) or "naive".
        damping: None for Anderson acceleration with automatic damping, or the damping in (0, 1] of
            plain steps.
        tolerance: tolerance of the fixed point; None for rtol 1e-10 in float64 and 1e-5 in float32.
        max_steps: maximum number of evaluations per sample.
        adjoint: adjoint of :func:`solvers.fixed_point`; None for no gradients. ``Unrolled`` treats
            ``chi C^-1`` as constant at each step, so its gradient is exact up to the size of the residual.
        mask: (B, N) bool, False for masked sites, which do not influence others and have zero results.
        given: pair of values (B, N, d) and bools (B, N), True for clamped sites. A clamped site keeps
            its value, acts on the others, and has no covariance. Values of free sites are ignored, even
            NaN. A value may also be the mean of a partially known spin.
        start: warm start, means and variances of an earlier solution, treated as constants. A sample
            whose ``chi`` is not positive definite there uses the default start.
        inverse_temperature: ``beta`` > 0 that multiplies couplings and fields. A sequence is an
            annealing schedule: each solve starts from the previous solution. Results and gradients are
            those of the last solve, ``steps`` and ``evaluations`` sums; ``max_steps`` applies to each.
        response: whether to return ``chi = dm_i/dx_j`` at fixed V, an estimate of the correlations
            ``<S_i S_j> - <S_i><S_j>``. Naive or second-order means may converge although ``chi`` is
            indefinite, which is checked only here.
        log_partition: whether to return ``log Z``, for priors of weight 1 (:mod:`solvers.spins.adaptive_tap`
            lists the formulas); with ``given``, the sum over the free sites only. Its gradients
            ``d log Z / dx = beta m`` and ``couplings.grad[i, j] = beta / 2 (m_i m_j^T + ...)`` need no
            adjoint solve; for ``SphericalSite(large_dimension=True)``, which is not a distribution, they
            hold up to O(1/d).
        record: whether to keep the trace of residuals.
        on_failure: "warn", "raise" or "ignore" samples that did not converge.

    Returns:
        A :class:`Solution` whose ``value`` is a :class:`SpinMarginals` without NaN. A sample that did
        not converge has the means of its sites at the cavity fields of the best iterate, and an
        unreliable ``log Z``. ``Status.INDEFINITE`` means that ``chi`` did not remain positive definite,
        because the model does not exist (Gaussian sites, ``Sigma^-1 - J`` indefinite) or the couplings are
        too strong. The result is then the last iterate with a positive definite ``chi``, or the starting
        point with an infinite residual and no response.

    Raises:
        TypeError, ValueError: if an argument is invalid.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.

    Source: :mod:`solvers.spins.adaptive_tap`.
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
    with torch.set_grad_enabled(tracked), without_autocast(field.device.type):
        x, matrix = as_wide(field), as_matrix(with_symmetries(couplings))
        state = _read_start(start, x)
        values = clamped = None
        energy = x.new_zeros(len(x))
        if given is not None:
            values, clamped = read_given(given, x)
            clamped = clamped if mask is None else clamped & mask
            values = zero_masked(values, clamped)
            # Clamped sites act as fields on the free ones.
            pull = (values.flatten(1) @ matrix).view_as(values)
            energy = (values * (x + pull / 2)).flatten(1).sum(1)
            x = x + pull
            mask = ~clamped if mask is None else ~clamped & mask
        earlier: list[Solution] = []
        for beta in betas[:-1]:
            model = CoupledSites(beta * matrix, beta * x, site, mask)
            with torch.no_grad():
                earlier.append(solve_theory(order, model, state, options))
            state = earlier[-1].value
        model = CoupledSites(betas[-1] * matrix, betas[-1] * x, site, mask)
        solution = solve_theory(order, model, state, options)
        solution.steps = solution.steps + sum(each.steps for each in earlier)
        solution.evaluations = solution.evaluations + sum(each.evaluations for each in earlier)
        marginals = _marginals(solution, model, order, response, log_partition)
        if values is not None and clamped is not None:
            mean = torch.where(clamped.unsqueeze(-1), values, marginals.mean)
            marginals = marginals._replace(mean=mean)
            if marginals.log_partition is not None:
                log_z = marginals.log_partition + betas[-1] * energy
                marginals = marginals._replace(log_partition=log_z)
        narrow = (None if t is None else t.to(field.dtype) for t in marginals[:4])
        solution.value = SpinMarginals(*narrow, marginals.log_partition)  # type: ignore[arg-type]
    apply_policy(solution, on_failure, ORDERS[order])
    return solution


def _marginals(
    solution: Solution, model: CoupledSites, order: str, response: bool, log_partition: bool
) -> SpinMarginals:
    """Return the results at the solved state; mark samples for which they do not exist."""
    mean, variance = solution.value
    own, covariance = model.moments(mean, variance)
    # An extrapolated iterate may lie outside the domain, unlike a site's own mean. A sample
    # without an iterate (infinite residual) keeps its start. The gradient is that of the iterate.
    kept = solution.converged | solution.residual.isinf()
    change = torch.where(kept[:, None, None] | ~own.isfinite(), 0.0, own - mean)
    mean = mean + change.detach()
    if isinstance(model.site, PottsSite):  # damped steps approach a distribution from outside
        total = mean.sum(-1, keepdim=True)
        mean = mean / torch.where(total > 0, total, 1.0)
    mean, variance = zero_masked(mean, model.mask), zero_masked(variance, model.mask)
    whole = log_z = None
    if response:
        whole, exists = linear_response(covariance, variance, model.matrix)
        solution.status = torch.where(exists, solution.status, int(Status.INDEFINITE))
    if log_partition:
        log_z, exists = free_energy(order, (mean, variance, covariance), model)
        solution.status = torch.where(exists, solution.status, int(Status.INDEFINITE))
    return SpinMarginals(mean, covariance, variance, whole, log_z)


def _read_start(start: Any, field: Tensor) -> SpinState | None:
    """Return a detached warm start with the dtype and device of ``field``, or None."""
    if start is None:
        return None
    require_instance("start", start, SpinState | SpinMarginals, "a SpinState or SpinMarginals")
    shape, name = (*field.shape, field.shape[-1]), "start.cavity_variance"
    return SpinState(
        read_start("start.mean", start.mean, shape[:3], field),
        read_start(name, start.cavity_variance, shape, field),
    )

"""The mean-field theories, naive, second order and adaptive TAP: maps, starts, solver, fixed points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from solvers.core.checks import require_count, require_number
from solvers.core.device import maybe_any
from solvers.core.modes import without_autocast
from solvers.core.problem import Problem
from solvers.core.rows import Point, where_rows
from solvers.core.solution import Solution, Status
from solvers.core.solver import Solver, Turn
from solvers.fixed_points import fixed_point
from solvers.methods.anderson import Anderson, Lists, Ring
from solvers.spins.inputs import as_matrix, as_wide, zero_masked
from solvers.spins.response import differentiable_response, is_definite, newton_step, times_blocks
from solvers.spins.sites import Site

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


def second_order_step(
    state: SpinState, field: Tensor, couplings: Tensor, site: Site, mask: Tensor | None = None
) -> SpinState:
    r"""One step of the second-order (TAP) equations, ``m_i <- mu_i``, ``V_i <- sum_j J_ij C_j J_ji``.

    ``mu_i`` and ``C_i`` are the site's mean and covariance at ``(h_i, V_i)``, as for :func:`tap_step`,
    which has the same arguments. Exact to second order in the couplings.

    Source: Thouless, Anderson, Palmer (1977), "Solution of 'Solvable model of a spin glass'",
    https://doi.org/10.1080/14786437708235992.
    """
    with without_autocast(state.mean.device.type):
        x, j = as_wide(field), as_matrix(couplings)
        m, v = (as_wide(t) for t in state)
        mu, covariance = site.moments(cavity_field(m, v, x, j, mask), v)
        variance = onsager_variance(zero_masked(covariance, mask), j).expand_as(v)
    return SpinState(mu.to(state.mean.dtype), variance.to(state.cavity_variance.dtype))


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


def no_variance(mean: Tensor) -> Tensor:
    """Zeros (B, N, d, d), one number in memory."""
    return mean.new_zeros(()).expand(*mean.shape, mean.shape[-1])


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

    def step(state: SpinState, field: Tensor, mask: Tensor | None) -> SpinState:
        one_step = tap_step if order == "adaptive" else second_order_step
        return one_step(state, field, couplings, site, mask)

    first = (
        SpinState(torch.zeros_like(field), no_variance(field).clone()) if start is None else start
    )
    options = options | {"args": (field, mask), "mask": mask}
    if order == "naive":
        solution = fixed_point(naive_step, first.mean, **options)
        solution.value = SpinState(solution.value, no_variance(field))
        return solution
    return fixed_point(step, _definite(start, model) if order == "adaptive" else first, **options)


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

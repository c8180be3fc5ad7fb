"""The maps whose fixed points are the naive mean-field and the adaptive TAP solution, and a start."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from solvers.core.modes import without_autocast
from solvers.spins.inputs import as_matrix, as_wide, zero_masked
from solvers.spins.response import differentiable_response, is_definite, respond, times_blocks
from solvers.spins.sites.site import Site

# Cavity variances that a start tries, in units of the largest eigenvalue of the couplings.
LEVELS = (0.0, 0.25, 0.5, 1.0)


class SpinState(NamedTuple):
    """Means (B, N, d) and cavity variances (B, N, d, d) of N sites."""

    mean: Tensor
    cavity_variance: Tensor


def coupling_field(mean: Tensor, matrix: Tensor, mask: Tensor | None) -> Tensor:
    """``sum_j J_ij m_j`` over the sites that are not masked, (B, N, d)."""
    return (zero_masked(mean, mask).flatten(1) @ matrix).view_as(mean)


def cavity_field(state: SpinState, field: Tensor, matrix: Tensor, mask: Tensor | None) -> Tensor:
    """``h_i = x_i + sum_j J_ij m_j - V_i m_i``, (B, N, d)."""
    onsager = (state.cavity_variance @ state.mean.unsqueeze(-1)).squeeze(-1)
    return field + coupling_field(state.mean, matrix, mask) - onsager


def naive_step(
    mean: Tensor, field: Tensor, couplings: Tensor, site: Site, mask: Tensor | None = None
) -> Tensor:
    """``m_i <- site mean at x_i + sum_j J_ij m_j``, (B, N, d): mean field without Onsager term."""
    matrix = as_matrix(couplings)
    with without_autocast(mean.device.type):
        m, x, j = (as_wide(t) for t in (mean, field, matrix))
        result = site.mean(x + coupling_field(m, j, mask), no_variance(m))
    return result.to(mean.dtype)


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
    matrix = as_matrix(couplings)
    with without_autocast(state.mean.device.type):
        x, j = as_wide(field), as_wide(matrix)
        wide = SpinState(as_wide(state.mean), as_wide(state.cavity_variance))
        mu, covariance = site.moments(cavity_field(wide, x, j, mask), wide.cavity_variance)
        # A site of zero covariance does not respond.
        covariance, residual = zero_masked(covariance, mask), zero_masked(mu - wide.mean, mask)
        step = _differentiable_step if torch.is_grad_enabled() else _direct_step
        mean, variance = step(wide, residual, covariance, j)
    return SpinState(mean.to(state.mean.dtype), variance.to(state.cavity_variance.dtype))


def _direct_step(
    state: SpinState, residual: Tensor, covariance: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    response = respond(covariance, state.cavity_variance, matrix)
    definite = response.definite
    step = torch.where(definite[:, None, None], response.newton_step(residual), torch.nan)
    change = torch.where(definite[:, None, None, None], response.correction, torch.nan)
    return state.mean + step, state.cavity_variance + change


def _differentiable_step(
    state: SpinState, residual: Tensor, covariance: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    amputated, variance = differentiable_response(covariance, state.cavity_variance, matrix)
    product = times_blocks(amputated.detach(), covariance.detach()).mT  # C Q, chi C^-1 = I + C Q
    step = (product @ residual.flatten(1).unsqueeze(-1)).view_as(residual)
    return state.mean + residual + step, variance


def starting_state(
    field: Tensor, couplings: Tensor, site: Site, mask: Tensor | None = None
) -> SpinState:
    """Means 0 and the smallest ``V = v I`` tried for which ``chi`` is positive definite.

    Tried are v = 0, a quarter, a half and all of the largest eigenvalue of J; at the last one ``chi``
    is positive definite for any covariances, as long as the sites exist at this V. A sample without a
    positive definite ``chi`` keeps V = 0; its solve then ends at once.

    Args:
        field: (B, N, d).
        couplings: (N, N, d, d).
        site: the sites' distribution.
        mask: (B, N) bool, False for masked sites.
    """
    with torch.no_grad(), without_autocast(field.device.type):
        x, matrix = as_wide(field.detach()), as_wide(as_matrix(couplings.detach()))
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
            definite = _surely_definite(covariance, (1 - level) * largest)
            if not bool(definite.all()):
                definite = definite | is_definite(covariance, tried, matrix)
            variance[rows[definite]] = tried[definite]
            rows = rows[~definite]
            if rows.numel() == 0:
                break
    return SpinState(mean.to(field.dtype), variance.to(field.dtype))


def _surely_definite(covariance: Tensor, largest: Tensor) -> Tensor:
    """(B,) bool: ``|C| |J| < 1``, which takes no factorisation; False where a covariance is NaN."""
    size = covariance.abs().sum(-1).flatten(1).amax(1)
    return size * largest < 1


def no_variance(mean: Tensor) -> Tensor:
    """Zeros (B, N, d, d), one number in memory."""
    return mean.new_zeros(()).expand(*mean.shape, mean.shape[-1])

"""The maps whose fixed points are the naive mean-field and the adaptive TAP solution."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from solvers.core.modes import without_autocast
from solvers.spins.response import differentiable_response, is_definite, respond, times_blocks
from solvers.spins.sites.site import Site

LEVELS = (
    0.0,
    0.25,
    0.5,
    1.0,
)  # of the starting cavity variance, in the couplings' largest eigenvalue


class SpinState(NamedTuple):
    """Means (B, N, d) and cavity variances (B, N, d, d) of N sites."""

    mean: Tensor
    cavity_variance: Tensor


def as_matrix(couplings: Tensor) -> Tensor:
    """(N, N, d, d) -> (Nd, Nd), rows ``(i, a)``, columns ``(j, b)``."""
    size = couplings.shape[0] * couplings.shape[2]
    return couplings.transpose(1, 2).reshape(size, size)


def with_symmetries(couplings: Tensor) -> Tensor:
    """The same couplings, whose gradient keeps their symmetry and their zeros."""
    sites = len(couplings)
    outside = 1 - torch.eye(sites, dtype=couplings.dtype, device=couplings.device)
    return (couplings + couplings.permute(1, 0, 3, 2)) / 2 * outside[:, :, None, None]


def pull_of(mean: Tensor, matrix: Tensor, mask: Tensor | None) -> Tensor:
    """``sum_j J_ij m_j``, (B, N, d); sites that do not count pull on nobody."""
    visible = mean if mask is None else torch.where(mask.unsqueeze(-1), mean, 0.0)
    return (visible.flatten(1) @ matrix).view_as(mean)


def cavity_field(state: SpinState, field: Tensor, matrix: Tensor, mask: Tensor | None) -> Tensor:
    """``h_i = x_i + sum_j J_ij m_j - V_i m_i``, (B, N, d)."""
    onsager = (state.cavity_variance @ state.mean.unsqueeze(-1)).squeeze(-1)
    return field + pull_of(state.mean, matrix, mask) - onsager


def naive_step(
    mean: Tensor, field: Tensor, couplings: Tensor, site: Site, mask: Tensor | None = None
) -> Tensor:
    """``m_i <- site mean at x_i + sum_j J_ij m_j``, (B, N, d): mean field without Onsager term."""
    matrix = as_matrix(couplings)
    with without_autocast(mean.device.type):
        m, x, j = (as_wide(t) for t in (mean, field, matrix))
        result = site.mean(x + pull_of(m, j, mask), _no_variance(m))
    return result.to(mean.dtype)


def tap_step(
    state: SpinState, field: Tensor, couplings: Tensor, site: Site, mask: Tensor | None = None
) -> SpinState:
    r"""One step of adaptive TAP on means m and cavity variances V.

    With ``h_i = x_i + sum_j J_ij m_j - V_i m_i``, the site's mean ``mu_i`` and covariance ``C_i`` at
    ``(h_i, V_i)``, and ``chi = (C^-1 + V - J)^-1``::

        m <- m + chi C^-1 (mu - m),   V_i <- V_i + C_i^-1 - [chi]_ii^-1

    The first is Newton's step for ``m = mu`` at fixed V; the second is ``Lambda_i - [chi]_ii^-1`` with
    ``Lambda_i = V_i + C_i^-1``. Both are fixed where ``m = mu`` and ``[chi]_ii = C_i``.

    Under differentiation the matrix ``chi C^-1`` counts as a constant: its derivative multiplies
    ``mu - m``, which is zero at a fixed point, so implicit derivatives of any order are exact.

    Args:
        state: means (B, N, d), cavity variances (B, N, d, d), symmetric.
        field: (B, N, d).
        couplings: (N, N, d, d), zero diagonal blocks, symmetric as a matrix; not checked.
        site: the sites' distribution.
        mask: (B, N) bool; sites that do not count influence nobody.

    Returns:
        a state; NaN in samples where ``chi`` is not positive definite.

    Source: Opper and Winther (2001), eqs. 22-24 and 36-40.
    """
    matrix = as_matrix(couplings)
    with without_autocast(state.mean.device.type):
        x, j = as_wide(field), as_wide(matrix)
        wide = SpinState(as_wide(state.mean), as_wide(state.cavity_variance))
        mu, covariance = site.moments(cavity_field(wide, x, j, mask), wide.cavity_variance)
        residual = mu - wide.mean
        if mask is not None:  # a site without variance answers nobody
            covariance = torch.where(mask[..., None, None], covariance, 0.0)
            residual = torch.where(mask.unsqueeze(-1), residual, 0.0)
        if torch.is_grad_enabled():
            mean, variance = _recorded_step(wide, residual, covariance, j)
        else:
            mean, variance = _plain_step(wide, residual, covariance, j)
    return SpinState(mean.to(state.mean.dtype), variance.to(state.cavity_variance.dtype))


def _plain_step(
    state: SpinState, residual: Tensor, covariance: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    response = respond(covariance, state.cavity_variance, matrix)
    definite = response.definite
    step = torch.where(definite[:, None, None], response.relax(residual), torch.nan)
    change = torch.where(definite[:, None, None, None], response.correction, torch.nan)
    return state.mean + step, state.cavity_variance + change


def _recorded_step(
    state: SpinState, residual: Tensor, covariance: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    amputated, variance = differentiable_response(covariance, state.cavity_variance, matrix)
    # chi C^-1 = I + C Q
    towards = times_blocks(amputated.detach(), covariance.detach()).mT
    step = (towards @ residual.flatten(1).unsqueeze(-1)).view_as(residual)
    return state.mean + residual + step, variance


def starting_state(
    field: Tensor, couplings: Tensor, site: Site, mask: Tensor | None = None
) -> SpinState:
    """Means 0 and the smallest ``V = v I`` tried for which ``chi`` is positive definite.

    The levels are v = 0, then a quarter, a half and all of the largest eigenvalue of J; at the last
    one ``chi`` is positive definite whatever the sites' covariances, as long as a site exists at this
    V. A sample that is definite at none keeps V = 0; its solve then ends at once.
    """
    with torch.no_grad(), without_autocast(field.device.type):
        x, matrix = as_wide(field.detach()), as_wide(as_matrix(couplings.detach()))
        mean, variance = torch.zeros_like(x), _no_variance(x).clone()
        unit = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        rows = torch.arange(len(x), device=x.device)
        finite = torch.where(matrix.isfinite(), matrix, 0.0)  # LAPACK raises at a NaN
        largest = torch.linalg.eigvalsh(finite)[-1].clamp_min(0.0)
        for level in LEVELS:
            tried = (level * largest * unit).expand(len(rows), *variance.shape[1:])
            covariance = site.moments(x[rows], tried)[1]
            covariance = covariance.expand(len(rows), *covariance.shape[1:])
            if mask is not None:
                covariance = torch.where(mask[rows][..., None, None], covariance, 0.0)
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


def _no_variance(mean: Tensor) -> Tensor:
    """Zeros (B, N, d, d), one number in memory."""
    return mean.new_zeros(()).expand(*mean.shape, mean.shape[-1])


def as_wide(tensor: Tensor) -> Tensor:
    """Half precision has no Cholesky factorisation."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))

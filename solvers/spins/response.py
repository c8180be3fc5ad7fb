r"""Compute the response of coupled sites and their cavity variances without inverting covariances.

Sites with covariances ``C_i``, cavity variances ``V_i`` and couplings ``J`` have the response
``chi = (C^-1 + V - J)^-1`` to fields. All formulas use the amputated response ``Q``::

    W = V - J,   Q = -W + W chi W,   chi = C + C Q C,   F = I + Q C

so ``C`` may be singular (Potts sites, saturated sites, masked sites with ``C_i = 0``), and small
``C`` lose no precision. Adaptive TAP requires ``[chi]_ii = C_i``, that is ``Q_ii = 0``::

    V_i <- V_i + C_i^-1 - [chi]_ii^-1 = V_i + Y_i,   Y_i = (I + Q_ii C_i)^-1 Q_ii

With ``C = L L^T``, ``chi`` is positive definite if ``M = I + L^T W L = S S^T`` is, and then
``Q = -W + Z^T Z`` with ``Z = S^-1 L^T W``: one Cholesky factorisation and one triangular solve.

Shapes: ``C``, ``V`` (B, N, d, d), ``J`` (n, n) with ``n = N d``, shared by the batch; matrices (B, n, n).

Source: Opper and Winther (2001), "Adaptive and self-averaging Thouless-Anderson-Palmer mean-field
theory for probabilistic modeling", https://doi.org/10.1103/PhysRevE.64.056131, eqs. 36-40.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

JITTER = 8.0  # JITTER eps trace(C) is added to a covariance, so that singular ones factorise


def newton_step(
    residual: Tensor, covariance: Tensor, variance: Tensor, couplings: Tensor
) -> tuple[Tensor, Tensor]:
    """Return Newton's step ``F^T r = (I + C W)^-1 r`` of the means at fixed V, and ``Y``, detached.

    Both are NaN in samples where ``chi`` is not positive definite.
    """
    batch, sites, dim = covariance.shape[:3]
    site_factor, rows, factor, definite = _factors(covariance, variance, couplings)
    half = torch.linalg.solve_triangular(factor, rows, upper=False)
    columns = half.view(batch, sites * dim, sites, dim).permute(0, 2, 3, 1).contiguous()
    correction, failed = _correction(columns @ columns.mT - variance, site_factor)
    definite = (definite & ~failed.any(1))[:, None, None]
    flat = residual.flatten(1).unsqueeze(-1)
    inner = torch.linalg.solve_triangular(factor.mT, half @ flat, upper=True)
    step = residual - (site_factor @ inner.view(*residual.shape, 1)).squeeze(-1)
    step = torch.where(definite, step, torch.nan)
    return step, torch.where(definite.unsqueeze(-1), correction, torch.nan)


def is_definite(covariance: Tensor, variance: Tensor, couplings: Tensor) -> Tensor:
    """Return whether ``chi`` is positive definite, (B,) bool; False if a covariance is NaN or indefinite."""
    return _factors(covariance, variance, couplings)[-1]


def _factors(
    covariance: Tensor, variance: Tensor, couplings: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``L``, ``L^T W``, ``S`` and whether they exist: (B, N, d, d), (B, n, n) twice, (B,)."""
    batch, sites, dim = covariance.shape[:3]
    site_factor, site_failed = factorise(covariance)
    interaction = interactions(variance, couplings)
    rows = site_factor.mT @ interaction.view(batch, sites, dim, sites * dim)
    columns = rows.view(batch, sites * dim, sites, dim).permute(0, 2, 3, 1)
    matrix = (site_factor.mT @ columns).reshape_as(interaction)  # M is symmetric: rows are columns
    matrix.diagonal(dim1=1, dim2=2).add_(1.0)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return site_factor, rows.view_as(interaction), factor, (failed == 0) & ~site_failed.any(1)


def factorise(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return lower Cholesky factors (..., d, d) of semidefinite blocks, and where they fail (...)."""
    limits = torch.finfo(covariance.dtype)
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    ridge = torch.diag_embed(
        (JITTER * limits.eps * trace + limits.tiny).expand(covariance.shape[:-1])
    )
    factor, failed = torch.linalg.cholesky_ex(covariance + ridge)
    return factor, failed != 0


def interactions(variance: Tensor, couplings: Tensor) -> Tensor:
    """Return ``W = V - J``, (B, n, n)."""
    batch, sites, dim = variance.shape[:3]
    whole = (-couplings).expand(batch, -1, -1).clone()
    blocks = whole.view(batch, sites, dim, sites, dim).diagonal(dim1=1, dim2=3)
    blocks.add_(variance.permute(0, 2, 3, 1))
    return whole


def _correction(diagonal: Tensor, site_factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``Y = Q - U^T U`` with ``U = T^-1 L^T Q``, ``T T^T = I + L^T Q L``, and where it fails."""
    rows = site_factor.mT @ diagonal
    scaled = rows @ site_factor
    scaled = scaled + torch.eye(scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
    factor, failed = torch.linalg.cholesky_ex(scaled)
    half = torch.linalg.solve_triangular(factor, rows, upper=False)
    return diagonal - half.mT @ half, failed != 0


def blocks(matrix: Tensor, sites: int) -> Tensor:
    """Return the diagonal blocks of (B, n, n) as (B, N, d, d)."""
    dim = matrix.shape[-1] // sites
    view = matrix.view(*matrix.shape[:-2], sites, dim, sites, dim)
    return view.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def without_blocks(matrix: Tensor, sites: int) -> Tensor:
    """Return the matrix with its diagonal blocks set to zero."""
    dim = matrix.shape[-1] // sites
    outside = 1 - torch.eye(sites, dtype=matrix.dtype, device=matrix.device)
    outside = outside[:, None, :, None].expand(sites, dim, sites, dim).reshape(matrix.shape[-2:])
    return matrix * outside


def times_blocks(matrix: Tensor, diagonal: Tensor) -> Tensor:
    """Multiply (B, n, n) by a block-diagonal matrix (B, N, d, d)."""
    batch, sites, dim = diagonal.shape[:3]
    columns = matrix.view(batch, sites * dim, sites, dim).transpose(1, 2) @ diagonal
    return columns.transpose(1, 2).reshape_as(matrix)


def _shifted(covariance: Tensor, variance: Tensor, couplings: Tensor) -> Tensor:
    """Return ``I + W C``, (B, n, n)."""
    product = times_blocks(interactions(variance, couplings), covariance)
    return product + torch.eye(len(couplings), dtype=product.dtype, device=product.device)


def full_response(covariance: Tensor, variance: Tensor, couplings: Tensor) -> Tensor:
    """Return ``F = (I + W C)^-1 = I + Q C``, (B, n, n), with derivatives up to the third order.

    ``chi`` must be positive definite. The value comes from a Cholesky factorisation; each Newton step for
    the inverse, which does not change it, at least doubles the number of its derivatives.
    """
    unit = torch.eye(len(couplings), dtype=couplings.dtype, device=couplings.device)
    with torch.no_grad():
        _, rows, factor, _ = _factors(covariance, variance, couplings)
        half = torch.linalg.solve_triangular(factor, rows, upper=False)
        amputated = half.mT @ half - interactions(variance, couplings)
        found = unit + times_blocks(amputated, covariance)
    if torch.is_grad_enabled():
        shifted = _shifted(covariance, variance, couplings)
        for _ in range(2):
            found = found @ (2 * unit - shifted @ found)
    return found


def next_variance(covariance: Tensor, variance: Tensor, couplings: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``V + Y``, differentiable to third order, and detached F; ``chi`` must be positive definite.

    First derivatives need no factorisation. With ``T_i = (I + Q_ii C_i)^-1``, ``R_ij = T_i Q_ij`` for
    ``j != i``, 0 for ``j = i``, and ``B = I + R C``::

        d(V + Y)_i = sum_j R_ij dC_j R_ij^T - sum_{j != i} B_ij dV_j B_ij^T + [B dJ B^T]_ii
    """
    with torch.no_grad():
        forward = full_response(covariance, variance, couplings)
    probe = _CouplingProbe.apply(couplings, (covariance, variance), forward)
    return _CavityVariance.apply(covariance, variance, couplings, probe, forward), forward


class _CouplingProbe(torch.autograd.Function):
    """Zeros (B, N, d, d) through which the gradient of ``V + Y`` reaches the couplings.

    This node depends only on J, so an adjoint iteration, which needs no gradient of J, skips its
    cost. (C, V) are passed in a tuple, which autograd does not track, for the backward formula.
    """

    @staticmethod
    def forward(
        ctx: Any, couplings: Tensor, sites: tuple[Tensor, Tensor], forward: Tensor
    ) -> Tensor:
        ctx.save_for_backward(couplings, forward)
        ctx.sites = sites
        return torch.zeros_like(sites[0], requires_grad=False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        couplings, forward = ctx.saved_tensors
        covariance, variance = ctx.sites
        batch, sites, dim = covariance.shape[:3]
        if torch.is_grad_enabled():
            forward = full_response(covariance, variance, couplings)
        weighted = cotangents[0] @ forward.view(batch, sites, dim, sites * dim)
        flat = forward.reshape(-1, sites * dim)
        return without_blocks(flat.mT @ weighted.reshape_as(flat), sites), None, None


class _CavityVariance(torch.autograd.Function):
    """(C, V, J, probe) -> V + Y; J receives its gradient from the probe."""

    @staticmethod
    def forward(
        ctx: Any,
        covariance: Tensor,
        variance: Tensor,
        couplings: Tensor,
        probe: Tensor,
        forward: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(covariance, variance, couplings)
        others, inverse, own = _parts(forward, covariance, variance, couplings)
        ctx.parts = others, inverse
        return variance + inverse @ own

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        covariance, variance, couplings = ctx.saved_tensors
        others, inverse = ctx.parts
        if torch.is_grad_enabled():
            forward = full_response(covariance, variance, couplings)
            others, inverse, _ = _parts(forward, covariance, variance, couplings)
        batch, sites, dim = covariance.shape[:3]
        cotangent = inverse.mT @ cotangents[0] @ inverse
        rows = others.view(batch, sites, dim, sites * dim)  # columns too: Q is symmetric
        columns = (cotangent @ rows).view(batch, sites * dim, sites, dim).transpose(1, 2)
        of_covariance = rows @ columns
        of_variance = -(covariance @ of_covariance @ covariance)
        return of_covariance, of_variance, None, cotangent, None


def _parts(
    forward: Tensor, covariance: Tensor, variance: Tensor, couplings: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q (B, n, n) without its diagonal blocks, ``T_i``, NaN if it is singular, and ``Q_ii``."""
    sites = covariance.shape[1]
    whole = -forward @ interactions(variance, couplings)
    own = blocks(whole, sites)
    shifted = own @ covariance
    unit = torch.eye(shifted.shape[-1], dtype=shifted.dtype, device=shifted.device)
    inverse, failed = torch.linalg.inv_ex(unit + shifted)
    inverse = torch.where((failed != 0)[..., None, None], torch.nan, inverse)
    return without_blocks(whole, sites), inverse, own


def linear_response(
    covariance: Tensor, variance: Tensor, couplings: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``chi = C F`` (B, N, d, N, d), or ``C`` if it is not positive definite, (B,) bool."""
    batch, sites, dim = covariance.shape[:3]
    with torch.no_grad():
        definite = is_definite(covariance, variance, couplings)
    chosen = definite[:, None, None, None]
    unit = torch.eye(sites, dtype=covariance.dtype, device=covariance.device)
    alone = covariance.unsqueeze(3) * unit[:, None, :, None]
    forward = full_response(torch.where(chosen, covariance, 0.0), variance, couplings)
    whole = covariance @ forward.view(batch, sites, dim, sites * dim)
    return torch.where(chosen.unsqueeze(4), whole.view_as(alone), alone), definite


def log_det(covariance: Tensor, variance: Tensor, couplings: Tensor) -> Tensor:
    """Return ``log det(I + W C)`` (B,) with derivatives of any order; ``chi`` must be positive definite."""
    return torch.logdet(_shifted(covariance, variance, couplings))

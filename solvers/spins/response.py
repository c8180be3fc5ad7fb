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
    flat = residual.reshape(residual.shape[0], -1, 1)
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


def differentiable_response(
    covariance: Tensor, variance: Tensor, couplings: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``(Q, V + Y)`` with derivatives of any order; ``chi`` must be positive definite.

    The derivative of the cavity variances needs no factorisation. With
    ``R_ij = (I + Q_ii C_i)^-1 Q_ij`` for ``j != i``, 0 for ``j = i``, and ``B = I + R C``::

        d(V + Y)_i = sum_j R_ij dC_j R_ij^T - sum_{j != i} B_ij dV_j B_ij^T + [B dJ B^T]_ii
    """
    amputated = _Amputated.apply(covariance, variance, couplings)
    probe = _CouplingProbe.apply(couplings, (amputated, covariance))
    return amputated, _CavityVariance.apply(amputated, covariance, variance, probe)


class _Amputated(torch.autograd.Function):
    """(C, V, J) -> Q, with ``dQ = -F dW F^T + Q dC Q``."""

    @staticmethod
    def forward(ctx: Any, covariance: Tensor, variance: Tensor, couplings: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        _, rows, factor, _ = _factors(covariance, variance, couplings)
        half = torch.linalg.solve_triangular(factor, rows, upper=False)
        amputated = half.mT @ half - interactions(variance, couplings)
        ctx.save_for_backward(covariance, amputated)
        return amputated

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        (cotangent,) = cotangents
        if cotangent is None:
            return None, None, None
        covariance, amputated = ctx.saved_tensors
        sites = covariance.shape[1]
        forward = times_blocks(amputated, covariance)
        inner = cotangent + forward.mT @ cotangent
        interaction = -(inner + inner @ forward)
        own = blocks(amputated @ cotangent @ amputated, sites)
        return own, blocks(interaction, sites), -without_blocks(interaction.sum(0), sites)


class _CouplingProbe(torch.autograd.Function):
    """Zeros (B, N, d, d) through which the gradient of the cavity variances reaches the couplings.

    This node depends only on J, so an adjoint iteration, which needs no gradient of J, skips its
    cost. (Q, C) are passed in a tuple, which autograd does not track, for the backward formula.
    """

    @staticmethod
    def forward(ctx: Any, couplings: Tensor, response: tuple[Tensor, Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.response = response
        return torch.zeros_like(response[1], requires_grad=False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        (cotangent,) = cotangents
        if cotangent is None:
            return None, None
        amputated, covariance = ctx.response
        if not torch.is_grad_enabled():
            amputated, covariance = amputated.detach(), covariance.detach()
        batch, sites, dim = covariance.shape[:3]
        unit = torch.eye(sites * dim, dtype=amputated.dtype, device=amputated.device)
        forward = unit + times_blocks(amputated, covariance)
        weighted = cotangent @ forward.view(batch, sites, dim, sites * dim)
        flat = forward.reshape(-1, sites * dim)
        return without_blocks(flat.mT @ weighted.reshape_as(flat), sites), None


class _CavityVariance(torch.autograd.Function):
    """(Q, C, V, probe) -> V + Y; the formula includes the gradient through Q, so Q receives none."""

    @staticmethod
    def forward(
        ctx: Any, amputated: Tensor, covariance: Tensor, variance: Tensor, probe: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        site_factor, _ = factorise(covariance)
        correction, _ = _correction(blocks(amputated, covariance.shape[1]), site_factor)
        ctx.save_for_backward(amputated, covariance, correction)
        ctx.others = None
        return variance + correction

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        (cotangent,) = cotangents
        if cotangent is None:
            return None, None, None, None
        amputated, covariance, correction = ctx.saved_tensors
        batch, sites, dim = covariance.shape[:3]
        own = blocks(amputated, sites)
        inverse = _inverse(own @ covariance, correction @ covariance)
        cotangent = inverse.mT @ cotangent @ inverse
        if torch.is_grad_enabled():
            others = without_blocks(amputated, sites)
        else:  # the case of every adjoint iteration
            if ctx.others is None:
                ctx.others = without_blocks(amputated, sites)
            others = ctx.others
        rows = others.view(batch, sites, dim, sites * dim)  # columns too: Q is symmetric
        columns = (cotangent @ rows).view(batch, sites * dim, sites, dim).transpose(1, 2)
        of_covariance = rows @ columns
        of_variance = -(covariance @ of_covariance @ covariance)
        return None, of_covariance, of_variance, cotangent


def _inverse(shift: Tensor, inverse_shift: Tensor) -> Tensor:
    """Return ``(I + X)^-1`` for a known ``Y' = I - (I + X)^-1``; each Newton step adds one derivative."""
    unit = torch.eye(shift.shape[-1], dtype=shift.dtype, device=shift.device)
    guess = unit - inverse_shift.detach()
    for _ in range(2 if torch.is_grad_enabled() else 0):
        guess = guess @ (2 * unit - (unit + shift) @ guess)
    return guess


def linear_response(
    covariance: Tensor, variance: Tensor, couplings: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``chi = C + C Q C`` (B, N, d, N, d), or ``C`` if it is not positive definite, (B,) bool."""
    sites = covariance.shape[1]
    with torch.no_grad():
        definite = is_definite(covariance, variance, couplings)
    unit = torch.eye(sites, dtype=covariance.dtype, device=covariance.device)
    alone = covariance.unsqueeze(3) * unit[:, None, :, None]
    covariance = torch.where(definite[:, None, None, None], covariance, 0.0)  # without response
    amputated, _ = differentiable_response(covariance, variance, couplings)
    right = times_blocks(amputated, covariance).view(*covariance.shape[:3], -1)
    return alone + (covariance @ right).view_as(alone), definite


def log_det(covariance: Tensor, variance: Tensor, couplings: Tensor) -> Tensor:
    """Return ``log det(I + C W)`` (B,) with derivatives of any order; ``chi`` must be positive definite."""
    interaction = interactions(variance, couplings)
    product = covariance @ interaction.view(*covariance.shape[:3], -1)
    unit = torch.eye(len(couplings), dtype=couplings.dtype, device=couplings.device)
    return torch.logdet(unit + product.view_as(interaction))

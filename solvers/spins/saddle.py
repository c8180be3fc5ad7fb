r"""Saddle point of spins on spheres in many dimensions.

For vectors of length ``sqrt d`` with scalar couplings K, the constraints ``|S_i|^2 = d`` written as Gaussian
integrals over multipliers ``Lambda_i`` leave, for large d, the minimum of a strictly convex function::

    Phi(Lambda) = d/2 (sum_i Lambda_i - log det(Lambda - K) - N) + 1/2 sum_a x_a^T (Lambda - K)^-1 x_a

on ``Lambda - K > 0``. With ``X = (Lambda - K)^-1`` and the means ``m = X x`` its gradient is
``d/2 (1 - X_ii - |m_i|^2 / d)`` and its Hessian ``d (X * X / 2 + X * m m^T / d)``, elementwise products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from solvers.core.checks import require_count, require_flag
from solvers.core.context import maybe_any
from solvers.core.modes import eager, without_autocast
from solvers.core.solution import Solution, Status, apply_policy, check_on_failure
from solvers.core.tolerance import Tolerance
from solvers.spins.inputs import (
    as_wide,
    check_inputs,
    usual_tolerance,
    with_symmetries,
    zero_masked,
)

ENOUGH = 1e-4  # share of the predicted decrease that a step must achieve (Armijo)
SHORT = 0.5  # share of the way to the border of the domain below which Newton's step is full
SHORTEST = 2.0**-40  # smallest share of Newton's step


class SaddlePoint(NamedTuple):
    """Result of :func:`spherical_saddle` for B models of N spins in d dimensions.

    Attributes:
        multiplier: (B, N) ``Lambda``, or (B, 1) if all sites share one; 1 at masked sites and in samples
            without unmasked ones. In half precision it is too inaccurate to recompute the other results.
        mean: (B, N, d) ``<S_i> = X x``.
        response: (B, N, N) ``X = (Lambda - K)^-1``: ``<S_i.S_j> - <S_i>.<S_j> = d X_ij``.
        log_partition: (B,) ``log Z``, at least float32; 0 without couplings and fields.
    """

    multiplier: Tensor
    mean: Tensor
    response: Tensor
    log_partition: Tensor


@eager
def spherical_saddle(
    couplings: Tensor,
    field: Tensor,
    *,
    per_site: bool = True,
    mask: Tensor | None = None,
    tolerance: Tolerance | float | None = None,
    max_steps: int = 100,
    on_failure: str = "warn",
) -> Solution:
    r"""Compute means, correlations and free energies of O(d) spins with scalar couplings for large d.

    For ``P(S) ~ exp(1/2 sum_ij K_ij S_i.S_j + sum_i x_i.S_i)``, spins uniform on ``|S_i|^2 = d``, minimise
    ``Phi`` over the multipliers ``Lambda`` (:mod:`solvers.spins.saddle`); then ``log Z = Phi`` and::

        <S_i> = m_i,   <S_i.S_j> - m_i.m_j = d X_ij,
        d log Z / dx_i = m_i,   d log Z / dK_ij = m_i.m_j + d X_ij

    ``couplings.grad[i, j]`` is half of ``d log Z / dK_ij``, because each pair has two entries. The relative
    error is O(1/d) for fixed N. The results agree with adaptive TAP with
    ``SphericalSite(large_dimension=True)`` up to O(1/d), at a cost of O(N^3 + N^2 d) instead of
    O(N^3 d^3). ``Phi`` is strictly convex and has one minimum, which damped Newton steps approach within
    the domain ``Lambda - K > 0``. Gradients of any order reach couplings and field.

    Args:
        couplings: ``K`` (N, N), or (B, N, N) for one model per sample, symmetric with zero diagonal. The
            gradient has the same symmetry and zeros.
        field: ``x`` (B, N, d) with the dtype and device of ``couplings``.
        per_site: whether each site has its own multiplier. False gives the spherical model, with one
            multiplier and the constraint ``sum_i |S_i|^2 = N d`` over the N unmasked sites.
        mask: (B, N) bool, False for masked sites, which do not influence others and have zero results
            and multiplier 1.
        tolerance: tolerance of the constraints, ``|<|S_i|^2> / d - 1| <= rtol``; None for 1e-10 in float64
            and 1e-5 in float32.
        max_steps: maximum number of factorisations per sample. Couplings of order 1 need about ten,
            couplings of order 1e4 with weak fields several hundred; from 1e6 on, rounding in float64
            prevents the default tolerance.
        on_failure: "warn", "raise" or "ignore" samples that did not converge.

    Returns:
        A :class:`Solution` whose ``value`` is a :class:`SaddlePoint`. Its ``residual`` is the largest
        ``|<|S_i|^2> / d - 1|``, or that of the mean over the unmasked sites if they share a multiplier,
        its ``evaluations`` count factorisations. A sample that did not converge has its best multipliers
        and the status ``Status.MAX_STEPS``, or ``Status.STALLED`` if rounding prevents further steps.

    Raises:
        TypeError, ValueError: if an argument is invalid.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.

    Example:
        >>> K = 0.1 * (torch.ones(4, 4) - torch.eye(4))  # (N, N)
        >>> found = spherical_saddle(K, torch.randn(2, 4, 16)).value
        >>> found.mean.shape, found.log_partition.shape
        (torch.Size([2, 4, 16]), torch.Size([2]))

    Source: H. E. Stanley (1968), "Spherical model as the limit of infinite spin dimensionality",
    https://doi.org/10.1103/PhysRev.176.718; M. Bal, afem, https://github.com/mcbal/afem, for the use as
    a layer.
    """
    require_flag("per_site", per_site)
    require_count("max_steps", max_steps)
    check_on_failure(on_failure)
    check_inputs(couplings, field, mask, scalar=True)
    rtol = usual_tolerance(tolerance, field.dtype).rtol
    with without_autocast(field.device.type):
        x = zero_masked(as_wide(field), mask)
        k = with_symmetries(as_wide(couplings)).expand(len(x), -1, -1)
        if mask is not None:  # masked sites are uncoupled
            k = torch.where(mask.unsqueeze(1) & mask.unsqueeze(2), k, 0.0)
        found = _search(k.detach(), x.detach(), per_site, mask, rtol, max_steps)
        multiplier, status, residual, count = found
        multiplier = _Multiplier.apply(k, x, multiplier, per_site, mask)
        point = _moments(multiplier, k, x, mask)
    narrow = (tensor.to(field.dtype) for tensor in point[:3])
    value = SaddlePoint(*narrow, point.log_partition)  # type: ignore[arg-type]
    solution = Solution(value, status, residual, residual, count, count)
    apply_policy(solution, on_failure, "saddle point of O(d) spins")
    return solution


def _moments(multiplier: Tensor, k: Tensor, x: Tensor, mask: Tensor | None) -> SaddlePoint:
    """Return the differentiable results at the saddle point."""
    _, sites, dim = x.shape
    whole = _of_sites(multiplier, sites, mask)
    factor, response = _inverse(whole, k)
    mean = response @ x
    log_det = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
    size = whole.sum(1) - log_det - sites
    log_z = (dim * size + (x * mean).flatten(1).sum(1)) / 2
    response = zero_masked(zero_masked(response, mask).mT, mask)
    return SaddlePoint(multiplier, mean, response, log_z)


def _of_sites(multiplier: Tensor, sites: int, mask: Tensor | None) -> Tensor:
    """Return the multiplier of every site, (B, N), which is 1 at masked sites.

    With it an uncoupled site without field satisfies the constraint and adds nothing to ``Phi``.
    """
    whole = multiplier.expand(-1, sites)
    return whole if mask is None else torch.where(mask, whole, 1.0)


def _inverse(multiplier: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Cholesky factor of ``Lambda - K`` and ``X``, (B, N, N) both."""
    factor, _ = torch.linalg.cholesky_ex(torch.diag_embed(multiplier) - k)
    unit = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return factor, torch.cholesky_solve(unit.expand_as(k), factor)


def _hessian(response: Tensor, overlaps: Tensor, per_site: bool, mask: Tensor | None) -> Tensor:
    """Return the Hessian of ``Phi / d``, (B, N, N) or (B, 1, 1); overlaps are ``m m^T / d``."""
    whole = response * (response / 2 + overlaps)
    if per_site:
        return whole
    common = zero_masked(whole, mask).sum((1, 2), keepdim=True)
    # The multiplier of a sample without sites is arbitrary, so its Hessian may be any nonzero number.
    return common if mask is None else common + (~mask.any(1)).to(common.dtype)[:, None, None]


class _Multiplier(torch.autograd.Function):
    """(K, x) -> given multipliers of the saddle point, with derivatives of any order.

    The gradient of ``Phi`` remains zero when K and x change: ``H dLambda = -d(grad Phi)``.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, x: Tensor, multiplier: Tensor, per_site: bool, mask: Tensor | None
    ) -> Tensor:
        result = multiplier.clone()
        ctx.per_site, ctx.mask = per_site, mask
        ctx.save_for_backward(k, x, result)
        return result

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (cotangent,) = cotangents
        k, x, multiplier = ctx.saved_tensors
        _, sites, dim = x.shape
        _, response = _inverse(_of_sites(multiplier, sites, ctx.mask), k)
        mean = response @ x
        hessian = _hessian(response, mean @ mean.mT / dim, ctx.per_site, ctx.mask)
        solved = torch.linalg.solve(hessian, cotangent.unsqueeze(-1)).expand(-1, sites, 1)
        weight = zero_masked(solved, ctx.mask)
        pulled = response @ (weight * mean)
        of_k = response @ (weight * response) / 2 + pulled @ mean.mT / dim
        return (of_k + of_k.mT) / 2, pulled / dim, None, None, None


def _search(
    k: Tensor, x: Tensor, per_site: bool, mask: Tensor | None, rtol: float, max_steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return multipliers, status, residual and evaluations of damped Newton steps for each sample.

    Each evaluation of ``Phi / d`` is at a trial point ``Lambda + t p``. If it lies in the domain and
    ``Phi`` has decreased enough, it is accepted, with a new Newton step p; otherwise t is halved.
    """
    batch, sites, dim = x.shape
    gram = x @ x.mT / dim  # the fields enter through it only
    square = gram.diagonal(dim1=1, dim2=2)
    # Uncoupled spins have Lambda = (1 + sqrt(1 + 4 |x|^2 / d)) / 2; the rows of K make it dominant.
    # It is 1 at masked sites and at least 1 at others.
    start = 0.5 + (0.25 + square).sqrt() + k.abs().sum(2)
    multiplier = trial = start if per_site else start.amax(1, keepdim=True)
    step, share, slope = torch.zeros_like(trial), x.new_ones(batch), x.new_zeros(batch)
    value, residual = x.new_full((2, batch), torch.inf)
    evaluations = torch.zeros(batch, dtype=torch.long, device=x.device)
    for _ in range(max_steps):
        active = (residual > rtol) & (share > SHORTEST)
        if not maybe_any(active):
            break
        evaluations += active
        whole = _of_sites(trial, sites, mask)
        factor, failed = torch.linalg.cholesky_ex(torch.diag_embed(whole) - k)
        response = torch.cholesky_inverse(factor)
        overlaps = response @ gram @ response
        log_det = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
        found = (whole.sum(1) - log_det - sites + (response * gram).flatten(1).sum(1)) / 2
        spare = 1 - (response + overlaps).diagonal(dim1=1, dim2=2)  # 1 - |S_i|^2 / d, 0 if masked
        if per_site:
            gradient, miss = spare / 2, spare.abs().amax(1)
        else:
            gradient = spare.sum(1, keepdim=True) / 2
            unmasked = sites if mask is None else mask.sum(1).clamp(min=1)
            miss = (spare.sum(1) / unmasked).abs()
        fallen = found <= value + ENOUGH * share * slope
        # If Phi is unchanged up to rounding, the gradient decides whether to accept the step.
        noise = 32 * torch.finfo(x.dtype).eps * (sites + whole.abs().sum(1) + log_det.abs())
        better = torch.where((found - value).abs() <= noise, miss < residual, fallen)
        good = active & (failed == 0) & found.isfinite() & better
        multiplier = torch.where(good.unsqueeze(1), trial, multiplier)
        value, residual = torch.where(good, found, value), torch.where(good, miss, residual)
        hessian = _hessian(response, overlaps, per_site, mask)
        newton, singular = torch.linalg.cholesky_ex(hessian)
        descent = -torch.cholesky_solve(gradient.unsqueeze(-1), newton).squeeze(-1)
        descent = torch.where((singular == 0).unsqueeze(1), descent, -gradient)
        step = torch.where(good.unsqueeze(1), descent, step)
        slope = torch.where(good, (gradient * descent).sum(1), slope)
        # Share of the way to the border of the domain, ignoring couplings.
        size = -zero_masked(step * response.diagonal(dim1=1, dim2=2), mask).amin(1)
        first = torch.where(size < SHORT, 1.0, 1 / (1 + size))
        share = torch.where(good, first, torch.where(active, share / 2, share))
        trial = multiplier + share.unsqueeze(1) * step
    ended = torch.where(share > SHORTEST, int(Status.MAX_STEPS), int(Status.STALLED))
    status = torch.where(residual <= rtol, int(Status.CONVERGED), ended)
    return multiplier, status, residual, evaluations

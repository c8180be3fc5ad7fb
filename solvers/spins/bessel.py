"""Functions of a unit circle in a field: ratios of Bessel functions, mean and covariance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BACKWARD_STEPS = 40  # of the recurrence of Bessel ratios, from an order where a bound is enough
FORWARD_FROM = 30.0  # above this |h|^2 the recurrence of the ratios loses no digits upwards
SERIES_FROM = 400.0  # above this |h|^2 the asymptotic series of the radial variance is exact
TINY = 1e-18  # I_1(r) / r is 1/2 there, where 0 / 0 is not


def _radial_series(terms: int) -> list[float]:
    """``c_n`` of ``1 - A/r - A^2 = sum_n c_n r^{-n-2}``, from ``A' = 1 - A/r - A^2`` order by order."""
    ratio = [1.0]  # a_n of A = sum_n a_n r^-n; that of A' at r^-n is -(n - 1) a_{n-1}
    for n in range(1, terms + 1):
        products = sum(ratio[k] * ratio[n - k] for k in range(1, n))
        ratio.append(((n - 2) * ratio[n - 1] - products) / 2)
    return [-n * each for n, each in enumerate(ratio)][1:]


SERIES = _radial_series(30)


class BesselRatio(torch.autograd.Function):
    r"""``g_v(s) = I_{v+1}(r) / (r I_v(r))``, ``r = sqrt s``: smooth in s >= 0, with all its derivatives.

    ``dg_v/ds = g_v (g_{v+1} - g_v) / 2`` and ``1 / g_v = 2 (v + 1) + s g_{v+1}``. An s that overflows
    counts as the largest number.
    """

    @staticmethod
    def forward(square: Tensor, order: int) -> Tensor:
        square = square.clamp_max(torch.finfo(square.dtype).max)
        root = square.sqrt().clamp_min(TINY)
        large = torch.special.i1e(root) / (torch.special.i0e(root) * root)
        if order == 0:
            return large
        for v in range(order):
            large = (1 / large - 2 * (v + 1)) / square.clamp_min(FORWARD_FROM)
        top = order + BACKWARD_STEPS
        small = 1 / (top + 0.5 + ((top + 1.5) ** 2 + square).sqrt())  # a bound of Amos
        for v in reversed(range(order, top)):
            small = 1 / (2 * (v + 1) + square * small)
        return torch.where(square < FORWARD_FROM, small, large)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        square, ctx.order = inputs
        ctx.save_for_backward(square)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        (square,) = ctx.saved_tensors
        ratio = BesselRatio.apply(square, ctx.order)
        higher = BesselRatio.apply(square, ctx.order + 1)
        slope = ratio * (higher - ratio)
        if ctx.order == 0:  # the two ratios agree in all digits for large s
            strong = square.clamp_min(FORWARD_FROM)
            slope = torch.where(
                square < FORWARD_FROM, slope, (RadialVariance.apply(strong) - ratio) / strong
            )
        return cotangents[0] * slope / 2, None


class RadialVariance(torch.autograd.Function):
    r"""``1 - A/r - A^2`` with ``A = I_1(r) / I_0(r)``, ``r = sqrt s``: the variance along the field.

    For ``s >= FORWARD_FROM``. It falls as ``1 / (2 s)``, which the formula loses; an asymptotic series
    in ``1 / r`` keeps it. ``dv/ds = g_0 (g_0 - g_1) / 2 - g_0 v``.
    """

    @staticmethod
    def forward(square: Tensor) -> Tensor:
        s = square.clamp_max(torch.finfo(square.dtype).max).double()
        ratio = BesselRatio.apply(s, 0)
        inverse = s.clamp_min(SERIES_FROM).rsqrt()
        series = torch.zeros_like(s)
        for coefficient in reversed(SERIES):
            series = series * inverse + coefficient
        direct = 1 - ratio - s * ratio.square()
        return torch.where(s < SERIES_FROM, direct, series * inverse.square()).to(square.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (square,) = ctx.saved_tensors
        ratio, variance = BesselRatio.apply(square, 0), RadialVariance.apply(square)
        return cotangents[0] * ((ratio - variance) / (2 * square) - ratio * variance)


class CircleMean(torch.autograd.Function):
    """``I_1(r) / I_0(r) h / r`` of fields h (..., 2), whose derivative is :func:`circle_covariance`."""

    @staticmethod
    def forward(parts: Tensor) -> Tensor:
        root = _radius(parts).clamp_min(TINY)
        return (torch.special.i1e(root) / torch.special.i0e(root)).unsqueeze(-1) * (
            parts / root.unsqueeze(-1)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (parts,) = ctx.saved_tensors
        return (circle_covariance(parts) @ cotangents[0].unsqueeze(-1)).squeeze(-1)


class LogBessel(torch.autograd.Function):
    """``log I_0(|h|)`` of fields h (..., 2), whose derivative is :class:`CircleMean`."""

    @staticmethod
    def forward(parts: Tensor) -> Tensor:
        root = _radius(parts)
        return torch.special.i0e(root).log() + root

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (parts,) = ctx.saved_tensors
        return cotangents[0].unsqueeze(-1) * CircleMean.apply(parts)


def _radius(parts: Tensor) -> Tensor:
    """``|h|`` of (..., 2), also where its square would overflow."""
    return torch.hypot(*parts.unbind(-1))


def circle_covariance(parts: Tensor) -> Tensor:
    """Of circles in fields h (..., 2): (..., 2, 2), differentiable.

    ``g_0`` across the field and :class:`RadialVariance` along it. Near 0, where there is no direction,
    ``g_0 1 + g_0 (g_1 - g_0) h h^T``.
    """
    square = parts.square().sum(-1, keepdim=True)
    weak = square < FORWARD_FROM
    near = torch.where(weak, parts, 0.0)
    near_square = torch.where(weak, square, 0.0)
    ratio, higher = BesselRatio.apply(near_square, 0), BesselRatio.apply(near_square, 1)
    unit = torch.eye(2, dtype=parts.dtype, device=parts.device)
    slope = (ratio * (higher - ratio)).unsqueeze(-1)
    around = ratio.unsqueeze(-1) * unit + slope * near.unsqueeze(-1) * near.unsqueeze(-2)
    far = torch.where(weak, 1.0, square)
    along = torch.where(weak, 0.0, parts) * far.rsqrt()
    across = torch.stack([-along[..., 1], along[..., 0]], -1)  # orthogonal in every digit
    beyond = BesselRatio.apply(far, 0).unsqueeze(-1) * across.unsqueeze(-1) * across.unsqueeze(-2)
    radial = RadialVariance.apply(far.clamp_min(FORWARD_FROM)).unsqueeze(-1)
    beyond = beyond + radial * along.unsqueeze(-1) * along.unsqueeze(-2)
    return torch.where(weak.unsqueeze(-1), around, beyond)

"""Products of circles against the sphere in two dimensions, circle by circle, and quadrature."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cases.spin_models import generator
from solvers import SphericalSite, TorusSite
from solvers.spins.sites.torus import BesselRatio, LogBessel

F64 = torch.float64
CIRCLES = 3


def fields(scale: float, *lead: int, dtype: torch.dtype = F64) -> Tensor:
    drawn = torch.randn(*(lead or (2, 3)), 2 * CIRCLES, generator=generator(3), dtype=F64)
    return (scale * drawn).to(dtype)


def nothing(field: Tensor) -> Tensor:
    return field.new_zeros(()).expand(*field.shape, field.shape[-1])


def circle_by_circle(field: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log Z, mean and covariance of each circle as a sphere of its own."""
    circle, parts = SphericalSite(1.0), field.unflatten(-1, (-1, 2))
    value = field.new_zeros(field.shape[:-1])
    mean, covariance = (
        torch.zeros_like(field),
        torch.zeros(*field.shape, field.shape[-1], dtype=F64),
    )
    for k in range(CIRCLES):
        here = slice(2 * k, 2 * k + 2)
        value = value + circle.log_partition(parts[..., k, :], blocks[..., k, :, :])
        moments = circle.moments(parts[..., k, :], blocks[..., k, :, :])
        mean[..., here], covariance[..., here, here] = moments
    return value, mean, covariance


@pytest.mark.parametrize("scale", [0.0, 1e-6, 0.3, 3.0, 50.0, 1e4])
@pytest.mark.parametrize("within", [False, True])
def test_a_torus_is_circles_of_their_own(scale: float, within: bool) -> None:
    field = fields(scale)
    blocks = torch.zeros(2, 3, CIRCLES, 2, 2, dtype=F64)
    if within:
        blocks = torch.randn(blocks.shape, generator=generator(4), dtype=F64)
        blocks = blocks + blocks.mT
    variance = torch.zeros(*field.shape, field.shape[-1], dtype=F64)
    for k in range(CIRCLES):
        here = slice(2 * k, 2 * k + 2)
        variance[..., here, here] = blocks[..., k, :, :]
    value, mean, covariance = circle_by_circle(field, blocks)
    site = TorusSite()
    torch.testing.assert_close(site.log_partition(field, variance), value, rtol=1e-11, atol=1e-11)
    found = site.moments(field, variance)
    torch.testing.assert_close(found[0], mean, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(found[1], covariance, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(site.mean(field, variance), mean, rtol=1e-10, atol=1e-11)


def test_log_partition_is_the_integral_over_the_angle() -> None:
    angle = torch.arange(400, dtype=F64) * (2 * math.pi / 400)
    ring = torch.stack([angle.cos(), angle.sin()], -1)
    field = fields(4.0)
    wanted = torch.logsumexp(field.unflatten(-1, (-1, 2)) @ ring.T, -1).sub(math.log(400)).sum(-1)
    got = TorusSite(CIRCLES).log_partition(field, nothing(field))
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 8.0])
def test_derivatives_of_any_order_by_the_field(scale: float) -> None:
    field = fields(scale, 1, 1).requires_grad_()
    site = TorusSite()

    def value(h: Tensor) -> Tensor:
        return site.log_partition(h, nothing(h))

    def moments(h: Tensor) -> tuple[Tensor, Tensor]:
        return site.moments(h, nothing(h))

    assert torch.autograd.gradcheck(value, (field,))
    assert torch.autograd.gradgradcheck(value, (field,), fast_mode=True)
    assert torch.autograd.gradcheck(moments, (field,))
    assert torch.autograd.gradgradcheck(moments, (field,), fast_mode=True)
    (slope,) = torch.autograd.grad(value(field).sum(), field)
    torch.testing.assert_close(slope, site.mean(field, nothing(field)), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_bessel_ratios_satisfy_their_recurrence_everywhere(order: int) -> None:
    """``1 / g_v = 2 (v + 1) + s g_{v+1}``, across the change of the method too."""
    s = torch.cat([torch.tensor([0.0], dtype=F64), torch.logspace(-12, 6, 400, dtype=F64)])
    ratio, higher = BesselRatio.apply(s, order), BesselRatio.apply(s, order + 1)
    torch.testing.assert_close(1 / ratio, 2 * (order + 1) + s * higher, rtol=1e-12, atol=0)
    assert ratio[0].item() == pytest.approx(1 / (2 * (order + 1)), rel=1e-14)


def test_single_precision_and_large_fields() -> None:
    field = torch.logspace(-20, 4, 25).reshape(1, 25, 1) * torch.ones(2 * CIRCLES)
    site, double = TorusSite(), field.double()
    for got, wanted in zip(
        site.moments(field, nothing(field)), site.moments(double, nothing(double)), strict=True
    ):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
    strong = LogBessel.apply(torch.tensor([1e6], dtype=F64) ** 2).item()
    assert strong == pytest.approx(1e6 - math.log(2 * math.pi * 1e6) / 2, rel=1e-12)


def test_errors_name_what_is_wrong() -> None:
    field = fields(1.0)
    with pytest.raises(ValueError, match="an even number of components, got d = 5"):
        TorusSite().mean(field[..., :5], nothing(field[..., :5]))
    with pytest.raises(ValueError, match="4 components, got d = 6"):
        TorusSite(2).mean(field, nothing(field))
    with pytest.raises(ValueError, match="couple different circles"):
        TorusSite().mean(field, torch.ones(2, 3, 6, 6, dtype=F64))
    with pytest.raises(ValueError, match="circles"):
        TorusSite(0)
    with pytest.raises(NotImplementedError, match="variance 0"):
        TorusSite().sample(field, variance=torch.ones(2, 3, 6, 6, dtype=F64))

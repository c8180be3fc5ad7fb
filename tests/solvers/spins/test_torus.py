"""Products of circles against the sphere in two dimensions, circle by circle, and quadrature."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from cases.spin_models import generator
from solvers import SphericalSite, TorusSite
from solvers.spins.spheres import BesselRatio

F64 = torch.float64
CIRCLES = 3


def fields(scale: float, *lead: int, dtype: torch.dtype = F64) -> Tensor:
    drawn = torch.randn(*(lead or (2, 3)), 2 * CIRCLES, generator=generator(3), dtype=F64)
    return (scale * drawn).to(dtype)


def nothing(field: Tensor) -> Tensor:
    return field.new_zeros(()).expand(*field.shape, field.shape[-1])


@pytest.mark.parametrize("scale", [0.0, 0.3, 50.0, 1e4])
def test_a_torus_is_circles_of_their_own(scale: float) -> None:
    field, site, circle = fields(scale), TorusSite(), SphericalSite(1.0)
    parts = field.unflatten(-1, (-1, 2)).flatten(1, 2)
    value = circle.log_partition(parts, nothing(parts)).view(2, 3, CIRCLES).sum(-1)
    mean, blocks = circle.moments(parts, nothing(parts))
    covariance = torch.stack([torch.block_diag(*each) for each in blocks.view(6, CIRCLES, 2, 2)])
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-11)
    close(site.log_partition(field, nothing(field)), value, rtol=1e-11)
    found = site.moments(field, nothing(field))
    close(found[0], mean.view_as(field))
    close(found[1], covariance.view_as(found[1]))


@pytest.mark.parametrize("scale", [0.0, 8.0])
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


@pytest.mark.parametrize("order", [0, 3])
def test_bessel_ratios_satisfy_their_recurrence_everywhere(order: int) -> None:
    """``1 / g_v = 2 (v + 1) + s g_{v+1}``, across the change of the method too."""
    s = torch.cat([torch.tensor([0.0], dtype=F64), torch.logspace(-12, 6, 400, dtype=F64)])
    ratio, higher = BesselRatio.apply(s, order), BesselRatio.apply(s, order + 1)
    torch.testing.assert_close(1 / ratio, 2 * (order + 1) + s * higher, rtol=1e-12, atol=0)
    assert ratio[0].item() == pytest.approx(1 / (2 * (order + 1)), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_variance_along_a_strong_field_keeps_its_digits(dtype: torch.dtype) -> None:
    """It falls as ``1 / (2 r^2)`` beside ``1 / r`` across: relative to the sphere, in double."""
    size = torch.tensor([0.5, 5.4, 5.6, 19.9, 20.1, 1e2, 1e3, 1e4, 1e5], dtype=dtype)
    field = torch.stack([size, torch.zeros_like(size)], -1).unsqueeze(0)
    wide = field.double()
    wanted = SphericalSite(1.0).covariance(wide, torch.zeros(1, 9, 2, 2, dtype=F64))[0]
    wanted[7:, 0, 0] = 0.5 / size[7:].double() ** 2 * (1 + 0.5 / size[7:] + 0.75 / size[7:] ** 2)
    site, rtol = TorusSite(), 1e-11 if dtype == F64 else 2e-5
    found = site.covariance(field, nothing(field))[0].double()
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=0)
    field = field.requires_grad_()
    mean = site.mean(field, nothing(field))
    (along,) = torch.autograd.grad(mean[..., 0].sum(), field)
    torch.testing.assert_close(along[0, :, 0].double(), wanted[:, 0, 0], rtol=rtol, atol=0)


def test_fields_whose_square_overflows() -> None:
    field = torch.tensor([[[3e25, 4e25]]])
    site = TorusSite()
    torch.testing.assert_close(site.mean(field, nothing(field)), torch.tensor([[[0.6, 0.8]]]))
    torch.testing.assert_close(site.log_partition(field, nothing(field)), torch.tensor([[5e25]]))
    assert site.covariance(field, nothing(field)).abs().max() < 1e-18


def test_errors_name_what_is_wrong() -> None:
    field = fields(1.0)
    with pytest.raises(ValueError, match="an even number of components, got d = 5"):
        TorusSite().mean(field[..., :5], nothing(field[..., :5]))
    with pytest.raises(ValueError, match="4 components, got d = 6"):
        TorusSite(2).mean(field, nothing(field))
    with pytest.raises(ValueError, match="variance must be zero"):
        TorusSite().mean(field, torch.ones(2, 3, 6, 6, dtype=F64))
    with pytest.raises(ValueError, match="circles"):
        TorusSite(0)

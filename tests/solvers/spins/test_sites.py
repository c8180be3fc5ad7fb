"""Single-site distributions against autograd, quadrature and Bessel functions; draws, Gibbs sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cases.spin_models import (
    as_matrix,
    couplings,
    enumerate_moments,
    fields,
    generator,
    potts_states,
)
from solvers import (
    GaussianSite,
    IsingSite,
    PottsSite,
    Site,
    SphericalSite,
    TorusSite,
    adaptive_tap,
    gibbs,
)
from solvers.spins.spheres import BesselRatio

F64 = torch.float64


class FromLogPartition(Site):
    """A site of which only log Z is known."""

    def __init__(self, inner: Site) -> None:
        super().__init__()
        self.inner = inner

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        return self.inner.log_partition(field, variance)


def gaussian(dim: int, sites: int | None = None) -> GaussianSite:
    shape = (dim, dim) if sites is None else (sites, dim, dim)
    half = torch.randn(*shape, generator=generator(5), dtype=F64)
    return GaussianSite(half @ half.mT / dim + 0.5 * torch.eye(dim, dtype=F64))


SITES: dict[str, tuple[Site, int]] = {
    "ising": (IsingSite(), 1),
    "potts": (PottsSite(), 3),
    "gaussian": (gaussian(3), 3),
    "gaussian each": (gaussian(2, 3), 2),
    "sphere": (SphericalSite(), 3),
    "circle of radius 1.3": (SphericalSite(1.3), 2),
    "saddle point": (SphericalSite(large_dimension=True), 4),
}
each = pytest.mark.parametrize("name", SITES)


def tilt(dim: int, seed: int = 0, scale: float = 0.2) -> tuple[Tensor, Tensor]:
    """A field (2, 3, d) and a symmetric V."""
    random = generator(seed)
    field = torch.randn(2, 3, dim, generator=random, dtype=F64)
    raw = scale * torch.randn(2, 3, dim, dim, generator=random, dtype=F64)
    return field, (raw + raw.mT) / 2


@each
def test_moments_are_derivatives_of_log_partition(name: str) -> None:
    """By the field, and by V, whose slope is half of the second moment."""
    (site, dim), close = SITES[name], partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
    field, variance = tilt(dim)
    mean, covariance = site.moments(field, variance)
    wanted_mean, wanted = FromLogPartition(site).moments(field, variance)
    close(mean, wanted_mean)
    close(covariance, wanted)
    close(site.mean(field, variance), mean)
    close(site.covariance(field, variance), covariance)
    assert not mean.requires_grad
    if name == "saddle point":  # no distribution
        return
    variance.requires_grad_()
    (slope,) = torch.autograd.grad(site.log_partition(field, variance).sum(), variance)
    second = covariance + mean.unsqueeze(-1) * mean.unsqueeze(-2)
    close((slope + slope.mT) / 2, second / 2)


@each
def test_first_and_second_derivatives(name: str) -> None:
    site, dim = (gaussian(2, 2), 2) if name == "gaussian each" else SITES[name]
    field, variance = (t[:1, :2].clone().requires_grad_() for t in tilt(dim, 1))

    def moments(h: Tensor, raw: Tensor) -> Any:
        return site.moments(h, (raw + raw.mT) / 2)

    assert torch.autograd.gradcheck(moments, (field, variance), fast_mode=True)
    assert torch.autograd.gradgradcheck(moments, (field, variance), fast_mode=True)


def test_partial_derivatives_where_the_field_depends_on_the_variance() -> None:
    field, variance = (t[:1, :1].clone().requires_grad_() for t in tilt(3, 2))

    def moments(h: Tensor, raw: Tensor) -> Any:
        v = (raw + raw.mT) / 2
        return SphericalSite().moments(h - (v @ h.unsqueeze(-1)).squeeze(-1), v)

    assert torch.autograd.gradgradcheck(moments, (field, variance), fast_mode=True)


# --- the sphere ------------------------------------------------------------------------------------


def bessel_ratio(order: float, t: float) -> float:
    """``I_{order+1}(t) / I_order(t)`` by backward recurrence from far away; all terms positive."""
    ratio = 0.0
    for k in range(int(2 * t) + 200, 0, -1):
        ratio = 1.0 / (2 * (order + k) / t + ratio)
    return ratio


@pytest.mark.parametrize("dim", [2, 3, 128])
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e4])
def test_sphere_is_the_bessel_ratio(dim: int, size: float) -> None:
    direction = torch.randn(1, 1, dim, generator=generator(dim), dtype=F64)
    direction = direction / direction.norm()
    field, variance = size * direction, torch.zeros(1, 1, dim, dim, dtype=F64)
    mean, covariance = SphericalSite().moments(field, variance)
    t, radius = size * dim**0.5, dim**0.5
    ratio = bessel_ratio(dim / 2 - 1, t)
    torch.testing.assert_close(mean, radius * ratio * direction, rtol=1e-12, atol=0)
    along = direction[0, 0]
    # Riccati's equation for the radial variance, radius / |h| times the ratio for the others.
    radial = (along @ covariance[0, 0] @ along).item()
    wanted = radius**2 * (1 - ratio**2 - (dim - 1) * ratio / t)
    assert abs(radial - wanted) <= 1e-11 * (1 + radius**2 * ratio * (dim - 1) / t)
    trace = covariance[0, 0].trace().item()
    assert trace - radial == pytest.approx((dim - 1) * radius * ratio / size, rel=1e-11)


def on_sphere(dim: int) -> tuple[Tensor, Tensor]:
    """Points (K, d) of a quadrature on the sphere of radius sqrt d, d = 2 or 3, and their weights."""
    angle = torch.arange(600, dtype=F64) * (2 * math.pi / 600)
    ring = torch.stack([angle.cos(), angle.sin()], -1)
    if dim == 2:
        return 2**0.5 * ring, torch.full((600,), 1 / 600, dtype=F64)
    height, weight = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(300))
    flat = (1 - height * height).sqrt()[:, None, None] * ring
    points = torch.cat([flat, height[:, None, None].expand(300, 600, 1)], -1)
    return 3**0.5 * points.reshape(-1, 3), weight.repeat_interleave(600) / 1200


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("scale", [0.0, 3.0, 10.0])
def test_sphere_against_quadrature(dim: int, scale: float) -> None:
    points, weights = on_sphere(dim)
    field, variance = tilt(dim, 4, scale)
    field = field * max(scale, 1.0)
    exponent = field @ points.T + 0.5 * torch.einsum("ka,...ab,kb->...k", points, variance, points)
    value = torch.logsumexp(exponent + weights.log(), -1)
    weight = torch.exp(exponent + weights.log() - value.unsqueeze(-1))
    mean = weight @ points
    around = points - mean.unsqueeze(-2)
    covariance = around.mT @ (weight.unsqueeze(-1) * around)
    site = SphericalSite()
    found = site.moments(field, variance)
    torch.testing.assert_close(found[0], mean, rtol=0, atol=1e-10)
    torch.testing.assert_close(found[1], covariance, rtol=0, atol=1e-10)
    torch.testing.assert_close(site.log_partition(field, variance), value, rtol=0, atol=1e-10)
    alone = adaptive_tap(torch.zeros(1, 1, dim, dim, dtype=F64), field[:, :1], site=site)
    if scale == 0.0:  # a single site has no cavity variance
        torch.testing.assert_close(alone.value.mean, mean[:, :1], rtol=0, atol=1e-10)


def test_large_dimension_is_the_known_formula_and_the_limit() -> None:
    errors = []
    for dim in (8, 64, 512):
        field = torch.randn(1, 2, dim, generator=generator(dim), dtype=F64)
        nothing = torch.zeros(1, 2, dim, dim, dtype=F64)
        mean = SphericalSite(large_dimension=True).mean(field, nothing)
        size = field.square().sum(-1, keepdim=True) / dim
        torch.testing.assert_close(mean, 2 * field / (1 + (1 + 4 * size).sqrt()))
        exact = SphericalSite().mean(field, nothing)
        errors.append(((mean - exact).norm() / exact.norm()).item() * dim)
    assert max(errors) < 1.0  # O(1/d)
    assert min(errors) > 0.01  # and not the same thing


# --- the others ------------------------------------------------------------------------------------


def test_saturated_sites_keep_their_digits() -> None:
    field = torch.tensor([[[20.0], [-300.0]]], dtype=F64)
    nothing = torch.zeros(1, 2, 1, 1, dtype=F64)
    covariance = IsingSite().covariance(field, nothing).flatten().tolist()
    assert covariance == pytest.approx([4 * math.exp(-40), 4 * math.exp(-600)], rel=1e-12)
    assert IsingSite().log_partition(field, nothing).flatten().tolist() == pytest.approx(
        [20 - math.log(2), 300 - math.log(2)]
    )
    field = torch.tensor([[[50.0, 0.0, 1.0]]], dtype=F64)
    _, covariance = PottsSite().moments(field, torch.zeros(1, 1, 3, 3, dtype=F64))
    assert covariance[0, 0, 0, 0].item() == pytest.approx(math.exp(-50) + math.exp(-49), rel=1e-12)
    assert covariance.sum(-1).abs().max() <= 1e-15 * covariance.max()


@pytest.mark.parametrize("site", [site for site, dim in SITES.values() if dim == 3])
def test_a_site_that_is_not_finite_spoils_no_other(site: Site) -> None:
    field, variance = tilt(3)
    wanted = site.moments(field, variance)
    variance[0, 1], field[1, 2] = torch.inf, torch.nan
    good = torch.ones(2, 3, dtype=torch.bool)
    good[0, 1] = good[1, 2] = False
    for got, true in zip(site.moments(field, variance), wanted, strict=True):
        torch.testing.assert_close(got[good], true[good])
        assert not torch.isfinite(got[0, 1]).all()


class Scalar(Site):
    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        return field.sum()


class Constant(Site):
    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        return torch.zeros(field.shape[:-1], dtype=field.dtype)


BAD: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: GaussianSite([[1.0]]), TypeError, "covariance must be a floating"),  # type: ignore[arg-type]
    (lambda: GaussianSite(torch.tensor([[1.0, 2.0], [0.0, 1.0]])), ValueError, "symmetric"),
    (lambda: GaussianSite(-torch.eye(2)), ValueError, "positive definite"),
    (lambda: GaussianSite(torch.eye(3)).moments(*tilt(2)), ValueError, "does not fit"),
    (lambda: SphericalSite(0.0), ValueError, "radius"),
    (lambda: SphericalSite().moments(*tilt(1)), ValueError, "d >= 2"),
    (lambda: Scalar().mean(*tilt(2)), ValueError, "one number per site"),
    (lambda: Constant().mean(*tilt(2)), ValueError, "does not depend on the field"),
    (lambda: Site().mean(*tilt(2)), NotImplementedError, "log_partition"),
    (lambda: TorusSite().mean(*tilt(5, scale=0)), ValueError, "an even number of components, got d = 5"),
    (lambda: TorusSite(2).mean(*tilt(6, scale=0)), ValueError, "4 components, got d = 6"),
    (lambda: TorusSite().mean(*tilt(6)), ValueError, "variance must be zero"),
    (lambda: TorusSite(0), ValueError, "circles"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), BAD)
def test_errors_name_what_is_wrong(
    call: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()


CIRCLES = 3


def circle_fields(scale: float, *lead: int, dtype: torch.dtype = F64) -> Tensor:
    drawn = torch.randn(*(lead or (2, 3)), 2 * CIRCLES, generator=generator(3), dtype=F64)
    return (scale * drawn).to(dtype)


def nothing(field: Tensor) -> Tensor:
    return field.new_zeros(()).expand(*field.shape, field.shape[-1])


@pytest.mark.parametrize("scale", [0.0, 0.3, 50.0, 1e4])
def test_a_torus_is_circles_of_their_own(scale: float) -> None:
    field, site, circle = circle_fields(scale), TorusSite(), SphericalSite(1.0)
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
    field = circle_fields(scale, 1, 1).requires_grad_()
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


CHAINS = 4_000
ERRORS = 4.5  # standard errors of a mean that are allowed


class OtherPotts(PottsSite):
    """Potts sites that are sampled by matrix products."""


def assert_moments(samples: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Mean (n,) and covariance (n, n) of samples (K, n), each within its own standard errors."""
    assert samples.isfinite().all()
    around = samples - mean
    products = around.unsqueeze(-1) * around.unsqueeze(-2)
    for got, wanted in ((samples, mean), (products, covariance)):
        error = (got.mean(0) - wanted).abs()
        allowed = ERRORS * got.std(0) / math.sqrt(len(samples)) + 1e-6
        assert (error <= allowed).all(), (error / allowed).max()


DRAWN = {
    name: site
    for name, site in SITES.items()
    if name not in ("circle of radius 1.3", "saddle point")
} | {"sphere in 20 dimensions": (SphericalSite(), 20)}


@pytest.mark.parametrize("name", DRAWN)
def test_draws_have_the_moments_of_the_site(name: str) -> None:
    site, dim = DRAWN[name]
    field = torch.randn(3, dim, generator=generator(1), dtype=F64)
    field[1] *= 3.0
    mean, covariance = site.moments(field[None], torch.zeros(1, 3, dim, dim, dtype=F64))
    drawn = site.sample(field.expand(CHAINS, 3, dim), generator(3))
    assert drawn.shape == (CHAINS, 3, dim) and drawn.dtype == F64 and not drawn.requires_grad
    for i in range(3):
        assert_moments(drawn[:, i], mean[0, i], covariance[0, i])


def test_a_state_without_weight_is_never_drawn() -> None:
    field = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(CHAINS, 1, 5)
    counts = PottsSite().sample(field, generator(0)).sum((0, 1))
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0] and (counts[[1, 3]] > 0.45 * CHAINS).all()


def test_a_site_without_sampler_says_so() -> None:
    class Bare(Site):
        def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
            return field.square().sum(-1)

    with pytest.raises(NotImplementedError, match="Bare cannot draw samples"):
        gibbs(
            couplings(2, 2, 0.1, generator(0)), torch.zeros(2, 2, dtype=F64), site=Bare(), sweeps=1
        )


# --- coupled sites ---------------------------------------------------------------------------------


def sample(blocks: Tensor, field: Tensor, site: Site, seed: int = 0, **options: Any) -> Tensor:
    options = {"sweeps": 20, "chains": CHAINS} | options
    return gibbs(blocks, field, site=site, generator=generator(seed), **options)


@pytest.mark.parametrize("site", [PottsSite(), OtherPotts()], ids=["looked up", "multiplied"])
def test_potts_sites_against_enumeration(site: Site) -> None:
    blocks = couplings(4, 3, 0.8, generator(0))
    blocks[0, 3] = blocks[3, 0] = 0.0  # not all pairs are coupled
    field = fields(1, 4, 3, generator(1))[0]
    exact = enumerate_moments(potts_states(4, 3), blocks, field)
    assert_moments(sample(blocks, field, site).flatten(1), *exact)


@pytest.mark.parametrize("each", [False, True])
def test_gaussian_sites_against_the_inverse(each: bool) -> None:
    site = gaussian(2, 3 if each else None)
    blocks, field = couplings(3, 2, 0.2, generator(0)), fields(1, 3, 2, generator(1))[0]
    precision = torch.block_diag(*torch.linalg.inv(site.sigma).expand(3, 2, 2))
    covariance = torch.linalg.inv(precision - as_matrix(blocks))
    mean = covariance @ field.flatten()
    assert_moments(sample(blocks, field, site).flatten(1), mean, covariance)
    with pytest.raises(ValueError, match="couplings are too strong"):
        sample(20 * blocks, field, site)


def test_two_coupled_spheres() -> None:
    blocks = torch.zeros(2, 2, 3, 3, dtype=F64)
    blocks[0, 1] = blocks[1, 0] = 0.5 * torch.eye(3, dtype=F64)
    spins = sample(blocks, torch.zeros(2, 3, dtype=F64), SphericalSite(), sweeps=40)
    cosine = (spins[:, 0] * spins[:, 1]).sum(-1) / 3
    wanted = 1 / math.tanh(1.5) - 1 / 1.5  # Langevin's function of K |S|^2
    assert (cosine.mean() - wanted).abs() < ERRORS * cosine.std() / math.sqrt(CHAINS)


@pytest.mark.parametrize("site", [PottsSite(), OtherPotts()], ids=["looked up", "multiplied"])
def test_clamped_sites_keep_their_values_and_act_on_the_others(site: Site) -> None:
    blocks = couplings(4, 3, 0.8, generator(0))
    field = fields(1, 4, 3, generator(1))[0]
    states = potts_states(4, 3)
    values = torch.full((CHAINS, 4, 3), torch.nan, dtype=F64)
    clamped = torch.zeros(CHAINS, 4, dtype=torch.bool)
    half = CHAINS // 2  # other sites at other values in the second half of the chains
    clues = ((slice(0, half), 1, 2), (slice(half, CHAINS), 3, 0))
    for part, place, colour in clues:
        values[part, place] = torch.eye(3, dtype=F64)[colour]
        clamped[part, place] = True
    spins = sample(blocks, field, site, given=(values, clamped))
    for part, place, colour in clues:
        allowed = states[states[:, 3 * place + colour] == 1]
        assert_moments(spins[part].flatten(1), *enumerate_moments(allowed, blocks, field))


DOMAINS: list[tuple[Site, list[float], list[float], str]] = [
    (IsingSite(), [-1.0], [0.25], r"\+1 or -1 for IsingSite, got \[0.25\]"),
    (PottsSite(), [0.0, 1.0], [0.5, 0.5], r"one-hot for PottsSite, got \[0.5, 0.5\]"),
    (SphericalSite(), [1.0, 1.0], [1.0, 0.0], "of length radius"),
    (SphericalSite(3.0), [0.0, -3.0], [1.0, 1.0], "of length radius"),
    (TorusSite(), [0.6, 0.8, 0.0, 1.0], [1.2, 0.8, 0.0, 1.0], "of length 1 on every circle"),
]


@pytest.mark.parametrize(("site", "right", "wrong", "words"), DOMAINS)
@pytest.mark.parametrize("dtype", [F64, torch.bfloat16])
def test_states_must_be_values_of_the_site(
    site: Site, right: list[float], wrong: list[float], words: str, dtype: torch.dtype
) -> None:
    dim = len(right)
    blocks, field = torch.zeros(2, 2, dim, dim, dtype=dtype), torch.zeros(2, dim, dtype=dtype)
    good, bad = (torch.tensor(value, dtype=dtype).expand(2, dim) for value in (right, wrong))
    clamped = torch.tensor([True, False])
    drawn = gibbs(blocks, field, site=site, sweeps=1, start=good[None], given=(good, clamped))
    assert torch.equal(drawn[0, 0], good[0]) and site.takes(drawn).all()
    gibbs(blocks, field, site=site, sweeps=1, start=drawn)
    with pytest.raises(ValueError, match="start must be " + words):
        gibbs(blocks, field, site=site, sweeps=1, start=bad[None])
    with pytest.raises(ValueError, match="given must be " + words):
        gibbs(blocks, field, site=site, sweeps=1, given=(bad, clamped))
    gibbs(blocks, field, site=site, sweeps=1, given=(bad, ~clamped & clamped))  # no one is clamped


def test_chains_go_on_from_a_start_and_have_fields_of_their_own() -> None:
    blocks = torch.zeros(3, 3, 1, 1, dtype=F64)
    blocks[0, 1] = blocks[1, 0] = blocks[1, 2] = blocks[2, 1] = 50.0
    start = torch.tensor([1.0, -1.0]).double().view(2, 1, 1).expand(2, 3, 1)
    again = sample(blocks, torch.zeros(3, 1, dtype=F64), IsingSite(), chains=None, start=start)
    assert torch.equal(again, start)
    field = 50 * start
    assert torch.equal(sample(0 * blocks, field, IsingSite(), chains=None), start)


def test_draws_come_from_the_generator_alone() -> None:
    blocks, field = couplings(3, 2, 0.5, generator(0)), fields(1, 3, 2, generator(1))
    state = torch.random.get_rng_state()
    first, second, other = (
        sample(blocks, field, PottsSite(), seed, chains=9) for seed in (4, 4, 5)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)
    single = sample(blocks.float(), field.float(), PottsSite(), chains=9)
    assert single.dtype == torch.float32


J, X = torch.zeros(3, 3, 2, 2), torch.zeros(3, 2)
VALUES, CLAMPED = torch.full((3, 2), 0.5), torch.tensor([True, False, False])
BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"site": "potts"}, TypeError, "site must be"),
    ({"sweeps": 0}, ValueError, "sweeps must be >= 1"),
    ({"field": X[:2]}, ValueError, "couplings must have the shape"),
    ({"field": X.expand(4, 3, 2)}, ValueError, "field must be one for all or for 2 chains"),
    ({"start": X.expand(2, 3, 2)}, ValueError, "start must be one-hot"),
    ({"start": X.expand(2, 3, 2) + math.nan}, ValueError, "start must be finite"),
    ({"start": (torch.rand(500, 2),)}, TypeError, "start must be a tensor or None"),
    ({"given": VALUES}, TypeError, "given must be a pair"),
    ({"given": (VALUES, CLAMPED)}, ValueError, "given must be one-hot"),
    ({"given": (VALUES, CLAMPED.float())}, TypeError, "given must hold floating values and a bool"),
    ({"given": (VALUES[:2], CLAMPED)}, ValueError, "given must hold values .* and bools"),
    ({"given": (VALUES, CLAMPED[:2])}, ValueError, "given must hold values .* and bools"),
    ({"given": (VALUES * math.nan, CLAMPED)}, ValueError, "given must hold finite values"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD_CALLS)
def test_gibbs_names_what_is_wrong(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    options: dict[str, Any] = {"couplings": J, "field": X, "site": PottsSite()}
    call: Callable[..., Tensor] = gibbs
    with pytest.raises(error, match=words):
        call(**({"sweeps": 1, "chains": 2} | options | change))

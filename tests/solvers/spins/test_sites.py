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


# --- the sphere ------------------------------------------------------------------------------------


def bessel_ratio(order: float, t: float) -> float:
    """``I_{order+1}(t) / I_order(t)`` by backward recurrence from far away; all terms positive."""
    ratio = 0.0
    for k in range(int(2 * t) + 200, 0, -1):
        ratio = 1.0 / (2 * (order + k) / t + ratio)
    return ratio


@pytest.mark.parametrize(("dim", "size"), [(2, 1.0), (3, 1e-8), (128, 1e4), (128, 1.0)])
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


@pytest.mark.parametrize(("dim", "scale"), [(2, 3.0), (3, 0.0), (3, 10.0)])
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


# --- the others ------------------------------------------------------------------------------------


class Scalar(Site):
    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        return field.sum()


class Constant(Site):
    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        return torch.zeros(field.shape[:-1], dtype=field.dtype)


BAD: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: GaussianSite([[1.0]]), TypeError, "covariance"),  # type: ignore[arg-type]
    (lambda: GaussianSite(torch.tensor([[1.0, 2.0], [0.0, 1.0]])), ValueError, "symmetric"),
    (lambda: GaussianSite(torch.eye(2) / 0), ValueError, "finite"),
    (lambda: GaussianSite(-torch.eye(2)), ValueError, "positive definite"),
    (lambda: GaussianSite(torch.eye(2, dtype=torch.long)), TypeError, "int64"),
    (lambda: GaussianSite(torch.stack([torch.eye(2), -torch.eye(2)])), ValueError, r"sites \[1\]"),
    (lambda: GaussianSite(torch.eye(3)).moments(*tilt(2)), ValueError, "covariance|field|site"),
    (lambda: SphericalSite(0.0), ValueError, "radius"),
    (lambda: SphericalSite().moments(*tilt(1)), ValueError, r"\bd\b"),
    (lambda: Scalar().mean(*tilt(2)), ValueError, "Scalar|log_partition"),
    (lambda: Constant().mean(*tilt(2)), ValueError, "Constant|field"),
    (lambda: Site().mean(*tilt(2)), NotImplementedError, "log_partition"),
    (lambda: TorusSite().mean(*tilt(5, scale=0)), ValueError, "d = 5|components"),
    (lambda: TorusSite(2).mean(*tilt(6, scale=0)), ValueError, "d = 6|components"),
    (lambda: TorusSite().mean(*tilt(6)), ValueError, "variance"),
    (lambda: TorusSite(0), ValueError, "circles"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), BAD)
def test_errors_name_what_is_wrong(
    call: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()


CIRCLES = 3


def circle_fields(scale: float, *lead: int) -> Tensor:
    return scale * torch.randn(*lead, 2 * CIRCLES, generator=generator(3), dtype=F64)


def nothing(field: Tensor) -> Tensor:
    return field.new_zeros(()).expand(*field.shape, field.shape[-1])


@pytest.mark.parametrize("scale", [0.0, 50.0])
def test_a_torus_is_circles_of_their_own(scale: float) -> None:
    field, site, circle = circle_fields(scale, 2, 3), TorusSite(), SphericalSite(1.0)
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
    assert torch.autograd.gradgradcheck(moments, (field,), fast_mode=True)
    (slope,) = torch.autograd.grad(value(field).sum(), field)
    torch.testing.assert_close(slope, site.mean(field, nothing(field)), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("size", [0.9, 1.1, 29.9, 30.1, 1e3, 1e8, 1e20])
def test_circles_in_strong_fields_lose_no_digits(size: float, dtype: torch.dtype) -> None:
    """The radial variance ``1 - A^2 - A / r`` cancels to ``1 / (2 r^2)``."""
    direction, site = torch.tensor([0.0, -1.0], dtype=dtype), TorusSite(1)
    field = (size * direction).expand(1, 1, 2)
    mean, covariance = site.moments(field, nothing(field))
    near = bessel_ratio(0, min(size, 1e3))
    wanted, radial = 1 - 0.5 / size, 0.5 / size**2 * (1 + 0.5 / size)  # for strong fields
    if size < 100:
        wanted, radial = near, 1 - near / size - near**2
    rtol = 1e-11 if dtype == F64 else 1e-5
    torch.testing.assert_close(mean[0, 0], wanted * direction, rtol=max(rtol, size**-2), atol=0)
    along = (direction @ covariance[0, 0] @ direction).item()
    assert along == pytest.approx(radial, rel=max(rtol, 3 * size**-2), abs=1e-16 / size + 1e-44)
    if dtype == F64:
        slopes = torch.autograd.functional.jacobian(lambda h: site.mean(h, nothing(h)), field)
        torch.testing.assert_close(slopes.view(2, 2), covariance[0, 0], rtol=1e-11, atol=0)


@pytest.mark.parametrize("size", [1.0, 1e3, 3e3, 1e4, 1e20])
def test_circles_in_strong_fields_are_solved(size: float) -> None:
    blocks = couplings(3, 2, 0.1, generator(0)).float()
    field = size * torch.nn.functional.normalize(fields(4, 3, 2, generator(1)), dim=2).float()
    options: Any = {"order": "naive", "response": True, "on_failure": "raise"}
    assert adaptive_tap(blocks, field, site=TorusSite(), **options).converged.all()


CHAINS = 4_000
ERRORS = 4.5  # standard errors of a mean that are allowed


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


# --- coupled sites ---------------------------------------------------------------------------------


def sample(blocks: Tensor, field: Tensor, site: Site, seed: int = 0, **options: Any) -> Tensor:
    options = {"sweeps": 20, "chains": CHAINS} | options
    return gibbs(blocks, field, site=site, generator=generator(seed), **options)


def test_potts_sites_against_enumeration() -> None:
    """Free, and with clamped sites, which keep their values and act on the others."""
    blocks = couplings(4, 3, 0.8, generator(0))
    blocks[0, 3] = blocks[3, 0] = 0.0  # not all pairs are coupled
    field, states = fields(1, 4, 3, generator(1))[0], potts_states(4, 3)
    exact = enumerate_moments(states, blocks, field)
    assert_moments(sample(blocks, field, PottsSite()).flatten(1), *exact)
    values = torch.full((CHAINS, 4, 3), torch.nan, dtype=F64)
    clamped = torch.zeros(CHAINS, 4, dtype=torch.bool)
    half = CHAINS // 2  # other sites at other values in the second half of the chains
    clues = ((slice(0, half), 1, 2), (slice(half, CHAINS), 3, 0))
    for part, place, colour in clues:
        values[part, place] = torch.eye(3, dtype=F64)[colour]
        clamped[part, place] = True
    spins = sample(blocks, field, PottsSite(), given=(values, clamped))
    for part, place, colour in clues:
        allowed = states[states[:, 3 * place + colour] == 1]
        assert_moments(spins[part].flatten(1), *enumerate_moments(allowed, blocks, field))


def test_a_draw_takes_one_product_and_reads_the_coupled_sites_alone() -> None:
    blocks, field = couplings(9, 3, 1.0, generator(0)), fields(1, 9, 3, generator(1))[0]
    sites = torch.arange(9)
    apart = ((sites - sites[:, None]).abs() > 1)[:, :, None, None]  # a chain
    chain, dense = (torch.where(apart, value, blocks) for value in (0.0, 1e-300))
    draws: list[Tensor] = []
    for model in (chain, dense):
        with torch.profiler.profile() as profile:
            draws.append(sample(model, field, PottsSite(), sweeps=2, chains=50))
        products = [e.count for e in profile.key_averages() if e.key == "aten::addmm"]
        assert products == [2 * 9]
    assert torch.equal(*draws)


DOMAINS: list[tuple[Site, list[float], list[float]]] = [
    (IsingSite(), [-1.0], [0.25]),
    (PottsSite(), [0.0, 1.0], [0.5, 0.5]),
    (SphericalSite(3.0), [0.0, -3.0], [1.0, 1.0]),
    (TorusSite(), [0.6, 0.8, 0.0, 1.0], [1.2, 0.8, 0.0, 1.0]),
]


@pytest.mark.parametrize(("site", "right", "wrong"), DOMAINS)
def test_states_must_be_values_of_the_site(
    site: Site, right: list[float], wrong: list[float]
) -> None:
    dim, dtype = len(right), F64
    blocks, field = torch.zeros(2, 2, dim, dim, dtype=dtype), torch.zeros(2, dim, dtype=dtype)
    good, bad = (torch.tensor(value, dtype=dtype).expand(2, dim) for value in (right, wrong))
    clamped = torch.tensor([True, False])
    run = partial(gibbs, blocks, field, site=site, sweeps=1)
    drawn = run(start=good[None], given=(good, clamped))
    assert torch.equal(drawn[0, 0], good[0]) and site.takes(drawn).all()
    with pytest.raises(ValueError, match="start"):
        run(start=bad[None])
    with pytest.raises(ValueError, match="given"):
        run(given=(bad, clamped))
    run(given=(bad, ~clamped & clamped))  # no one is clamped


J, X = torch.zeros(3, 3, 2, 2), torch.zeros(3, 2)
VALUES, CLAMPED = torch.full((3, 2), 0.5), torch.tensor([True, False, False])
BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"site": "potts"}, TypeError, "site"),
    ({"sweeps": 0}, ValueError, "sweeps"),
    ({"field": X[:2]}, ValueError, "couplings"),
    ({"field": X.expand(4, 3, 2)}, ValueError, "field"),
    ({"start": X.expand(2, 3, 2)}, ValueError, "start"),
    ({"start": X.expand(2, 3, 2) + math.nan}, ValueError, "start"),
    ({"given": VALUES}, TypeError, "given"),
    ({"given": (VALUES, CLAMPED)}, ValueError, "given"),
    ({"given": (VALUES, CLAMPED.float())}, TypeError, "given"),
    ({"given": (VALUES, CLAMPED[:2])}, ValueError, "given"),
    ({"given": (VALUES * math.nan, CLAMPED)}, ValueError, "given"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD_CALLS)
def test_gibbs_names_what_is_wrong(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    options: Any = {"couplings": J, "field": X, "site": PottsSite(), "sweeps": 1, "chains": 2}
    with pytest.raises(error, match=words):
        gibbs(**(options | change))


def test_gaussian_sites_against_the_inverse() -> None:
    site = gaussian(2, 3)
    blocks, field = couplings(3, 2, 0.2, generator(0)), fields(1, 3, 2, generator(1))[0]
    precision = torch.block_diag(*torch.linalg.inv(site.sigma).expand(3, 2, 2))
    covariance = torch.linalg.inv(precision - as_matrix(blocks))
    mean = covariance @ field.flatten()
    assert_moments(sample(blocks, field, site).flatten(1), mean, covariance)
    with pytest.raises(ValueError, match="couplings"):
        sample(20 * blocks, field, site)

"""Spins in time: closures written out, orders of the error, steady states, the dynamics themselves."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.spin_models import generator
from solvers import (
    GaussianSite,
    Implicit,
    IsingSite,
    PottsSite,
    Site,
    SphericalSite,
    glauber,
    kinetic_map,
    kinetic_step,
    kinetic_trajectory,
    steady_state,
)
from solvers.spins.kinetic import law_of

F64 = torch.float64
SPHERE, LARGE = SphericalSite(1.4), SphericalSite(1.4, large_dimension=True)
GAUSSIAN = GaussianSite(torch.diag(torch.tensor([0.4, 0.7, 0.3], dtype=F64)))
# Site, dimensions, closures
KINDS: list[tuple[Site, int, tuple[str, ...]]] = [
    (IsingSite(), 1, ("naive", "gaussian", "tap", "plefka")),
    (PottsSite(), 3, ("naive", "tap", "plefka")),
    (GAUSSIAN, 3, ("naive", "gaussian", "tap")),
    (SPHERE, 3, ("naive", "gaussian", "tap")),
    (LARGE, 3, ("naive", "gaussian", "tap", "plefka")),
]
EACH = [(site, dim, closure) for site, dim, closures in KINDS for closure in closures]
each_kind = pytest.mark.parametrize(
    ("site", "dim"), [kind[:2] for kind in KINDS], ids=lambda value: str(value)
)
each = pytest.mark.parametrize(("site", "dim", "closure"), EACH, ids=lambda value: str(value))


def means_and_fields(site: Site, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Means that such sites can have, and fields, (2, 4, d)."""
    before, field = torch.randn(2, 2, 4, dim, generator=generator(seed), dtype=F64)
    return site.mean(before, before.new_zeros(2, 4, dim, dim)), field


def couplings(*shape: int, scale: float = 0.3) -> Tensor:
    """Asymmetric numbers, with a diagonal."""
    return scale * torch.randn(shape, generator=generator(1), dtype=F64)


@each_kind
def test_the_covariance_of_a_mean(site: Site, dim: int) -> None:
    """It is the derivative of the mean by the field, at the field that has this mean."""
    field = torch.randn(2, 4, dim, generator=generator(0), dtype=F64)
    law, none = law_of(site, dim), field.new_zeros(2, 4, dim, dim)
    mean = law.mean(field)
    torch.testing.assert_close(mean, site.mean(field, none))
    expected = site.covariance(field, none)
    torch.testing.assert_close(law.covariance(mean), expected, rtol=1e-9, atol=1e-9)
    trace = expected.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    if site is LARGE:  # exactly what the sphere has, that of the covariance only nearly
        trace = 1.4**2 - mean.square().sum(-1, keepdim=True)
    torch.testing.assert_close(law.scatter(mean), trace)


@each
def test_the_equation_of_a_step(site: Site, dim: int, closure: str) -> None:
    """Sums over j written out in loops; the result of "tap" and "plefka" solves its equation."""
    mean, field = means_and_fields(site, dim)
    j, law = couplings(2, 4, 4), law_of(site, dim)
    after = kinetic_step(mean, field, j, site=site, closure=closure)
    covariance = law.covariance(mean)
    theta, noise = field.clone(), torch.zeros_like(covariance)
    for n, i, k in itertools.product(range(2), range(4), range(4)):
        strength = j[n, i, k]
        theta[n, i] += strength * mean[n, k]
        noise[n, i] += strength**2 * covariance[n, k]
    none, trace = torch.zeros_like(noise), noise.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    pull = (noise @ after.unsqueeze(-1)).squeeze(-1)
    if closure == "naive" or site is GAUSSIAN:
        expected = site.mean(theta, none)
    elif closure == "gaussian":
        extra = law.scatter(mean) - covariance.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
        expected = law.averaged(theta, trace + j.square() @ extra)
    elif closure == "plefka" and site is LARGE:
        distance = theta - after / law.response(after)[0]  # pyright: ignore
        h = theta + law.reaction(distance, after, trace, pull)  # pyright: ignore
        expected = site.mean(h, none)
    else:
        expected = site.mean(theta - pull, noise)
    torch.testing.assert_close(after, expected, rtol=1e-7, atol=1e-8)
    at_itself = kinetic_map(mean, field, j, site=site, closure=closure)
    if closure in ("naive", "gaussian"):
        torch.testing.assert_close(at_itself, after)


@pytest.mark.parametrize("noise", [1e-6, 4.0])
def test_the_gaussian_average_in_strong_noise(noise: float) -> None:
    """Value and slopes beside a rule of 40,001 nodes; the slope by the variance is half the average of
    the second derivative, ``-2 tanh (1 - tanh^2)``."""
    field = torch.tensor([0.0, 0.4, -3.0, 60.0], dtype=F64).view(1, 4, 1).requires_grad_()
    variance = torch.full((1, 4, 1), noise, dtype=F64, requires_grad=True)
    found = law_of(IsingSite(), 1).averaged(field, variance)
    slopes = torch.autograd.grad(found.sum(), (field, variance))
    nodes = torch.linspace(-12, 12, 40001, dtype=F64)
    weights = torch.softmax(-nodes.square() / 2, dim=0)
    mean = torch.tanh(field.detach() + noise**0.5 * nodes)
    slope = 1 - mean.square()
    expected = (mean, slope, -mean * slope)
    for value, table in zip((found, *slopes), expected, strict=True):
        torch.testing.assert_close(value[..., 0], table @ weights, rtol=1e-9, atol=1e-12)


@each
def test_nan_at_masked_sites_reaches_no_other(site: Site, dim: int, closure: str) -> None:
    mean, field = means_and_fields(site, dim)
    j, mask = couplings(4, 4), torch.tensor([[True, True, False, True], [True] * 4])
    clean = [mean.requires_grad_(), field.requires_grad_()]
    options: dict[str, Any] = {"site": site, "closure": closure, "mask": mask}
    expected = kinetic_step(mean, field, j, **options)
    slopes = torch.autograd.grad(expected[mask].square().sum(), clean)
    nan = torch.where(mask.unsqueeze(-1), 0.0, float("nan"))
    spoilt = [(tensor + nan).detach().requires_grad_() for tensor in clean]
    found = kinetic_step(spoilt[0], spoilt[1], j, on_failure="raise", **options)
    torch.testing.assert_close(found[mask], expected[mask])
    assert bool(found[~mask].isnan().all()) and torch.equal(expected[~mask], mean[~mask])
    kept = torch.tensor([0, 1, 3])
    alone = kinetic_step(
        mean[:1, kept], field[:1, kept], j[kept][:, kept], site=site, closure=closure
    )
    torch.testing.assert_close(expected[:1, kept], alone)
    gradients = torch.autograd.grad(found[mask].square().sum(), spoilt)
    torch.testing.assert_close(gradients, slopes)


@pytest.mark.parametrize("closure", ["naive", "gaussian", "tap"])
def test_orders_of_the_error(closure: str) -> None:
    """One step of Ising spins from independent ones, enumerated: halving J divides the error of the
    naive closure by 4, of the others by 8."""
    mean, field = means_and_fields(IsingSite(), 1)
    states = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=4)), dtype=F64)
    weights = ((1 + states.unsqueeze(1) * mean[..., 0]) / 2).prod(-1)  # (16, 2)

    def error(scale: float) -> float:
        j = couplings(4, 4, scale=scale)
        fields = field[..., 0] + (states @ j.T).unsqueeze(1)
        exact = (weights.unsqueeze(-1) * torch.tanh(fields)).sum(0)
        found = kinetic_step(mean, field, j, site=IsingSite(), closure=closure)[..., 0]
        return (found - exact).norm().item()

    ratio = error(0.02) / error(0.01)
    assert ratio == pytest.approx(4 if closure == "naive" else 8, rel=0.1)


@pytest.mark.parametrize(
    ("site", "dim", "closure"),
    [
        (IsingSite(), 1, "gaussian"),
        (IsingSite(), 1, "tap"),
        (SPHERE, 2, "gaussian"),
        (LARGE, 2, "plefka"),
    ],
)
def test_gradients_of_a_step(site: Site, dim: int, closure: str) -> None:
    mean, field = (t[:1, :2].clone().requires_grad_() for t in means_and_fields(site, dim))
    j = couplings(4, 4)[:2, :2].clone().requires_grad_()

    def step(*inputs: Tensor) -> Tensor:
        return kinetic_step(*inputs, site=site, closure=closure)

    assert torch.autograd.gradcheck(step, (mean, field, j), atol=1e-6, rtol=1e-4)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"couplings": torch.zeros(3, 3)}, ValueError, "couplings"),
    ({"site": "ising"}, TypeError, "site"),
    ({"site": PottsSite()}, ValueError, "closure"),
    ({"site": SPHERE, "closure": "plefka"}, ValueError, "closure"),
    ({"max_steps": -5}, ValueError, "max_steps"),
    ({"site": IsingSite()}, ValueError, "IsingSite"),
    ({"closure": "tap", "mean": torch.full((2, 4, 3), math.nan)}, ValueError, "mean"),
    ({"closure": "tap", "couplings": torch.full((4, 4), math.nan)}, ValueError, "couplings"),
]  # fmt: skip


TIGHT: dict[str, Any] = {"tolerance": 1e-11, "max_steps": 200}


def network(dim: int, apart: bool) -> tuple[Tensor, Tensor]:
    """Fields (2, 3, d), and couplings that samples share or have apart."""
    field = torch.randn(2, 3, dim, generator=generator(0), dtype=F64)
    return field, couplings(*((2, 3, 3) if apart else (3, 3)), scale=0.2)


CASES = [
    (IsingSite(), 1, "gaussian"),
    (IsingSite(), 1, "tap"),
    (PottsSite(), 3, "tap"),
    (LARGE, 3, "naive"),
    (LARGE, 3, "gaussian"),
    (LARGE, 3, "plefka"),
]


@pytest.mark.parametrize(("site", "dim", "closure"), CASES)
def test_a_steady_state_is_a_fixed_point_of_the_step(site: Site, dim: int, closure: str) -> None:
    """And the trajectory from elsewhere ends there."""
    field, j = network(dim, True)
    options: dict[str, Any] = {"site": site, "closure": closure}
    found = steady_state(field, j, **options, **TIGHT)
    assert bool(found.converged.all())
    after = kinetic_step(found.value, field, j, **options)
    torch.testing.assert_close(after, found.value, rtol=1e-8, atol=1e-8)
    last = kinetic_trajectory(torch.full_like(field, 1 / dim), field, j, steps=20, **options)[-1]
    torch.testing.assert_close(last, found.value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("site", "dim", "closure", "apart"),
    [(IsingSite(), 1, "tap", True), (LARGE, 2, "gaussian", True), (LARGE, 2, "plefka", False)],
)
def test_implicit_gradients(site: Site, dim: int, closure: str, apart: bool) -> None:
    field, j = (tensor.requires_grad_() for tensor in network(dim, apart))
    options: dict[str, Any] = TIGHT | {"adjoint": Implicit(tolerance=1e-11)}

    def solved(field: Tensor, j: Tensor) -> Tensor:
        return steady_state(field, j, site=site, closure=closure, **options).value

    assert torch.autograd.gradcheck(solved, (field, j), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("site", "dim"), [(IsingSite(), 1), (PottsSite(), 3), (SphericalSite(1.4), 3)]
)
def test_the_first_step_of_the_dynamics(site: Site, dim: int) -> None:
    """From known spins the means after a step are exact: the simulation is within 4 standard errors."""
    chains = 4000
    field = torch.randn(3, dim, generator=generator(0))
    j = torch.randn(3, 3, generator=generator(1))
    spins = site.sample(field, generator(2))
    run = glauber(
        spins.expand(chains, -1, -1), field, j, steps=1, site=site, generator=generator(3)
    )
    exact = kinetic_step(spins[None], field[None], j, site=site, closure="naive")[0]
    error = (run.spins.var(0) / chains).sqrt()
    assert torch.equal(run.means[0], spins.expand(chains, -1, -1).mean(0))
    assert bool(((run.means[1] - exact).abs() <= 4 * error + 1e-6).all())
    assert torch.equal(run.means[-1], run.spins.mean(0))


WRONG_DYNAMICS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"spins": torch.ones(3, 1)}, ValueError, "spins"),
    ({"couplings": torch.zeros(5, 3, 3)}, ValueError, "couplings"),
    ({"field": torch.full((3, 1), math.nan)}, ValueError, "field"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "changes", "error", "message"),
    [*((kinetic_step, *row) for row in WRONG), *((glauber, *row) for row in WRONG_DYNAMICS)],
)
def test_mistakes(call: Any, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    step: dict[str, Any] = {
        "mean": torch.zeros(2, 4, 3), "field": torch.zeros(2, 4, 3), "couplings": torch.zeros(4, 4),
        "site": LARGE,
    }  # fmt: skip
    run: dict[str, Any] = {
        "spins": torch.ones(5, 3, 1), "field": torch.zeros(3, 1), "couplings": torch.zeros(3, 3),
        "steps": 1, "site": IsingSite(),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        call(**((step if call is kinetic_step else run) | changes))


@pytest.mark.parametrize("dim", [2, 8])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_spheres_in_strong_fields(dtype: torch.dtype, dim: int) -> None:
    """The field is read off a mean near the sphere up to what rounding leaves of ``R^2 - |m|^2``."""
    radius = (dim / 2) ** 0.5
    site, law = SphericalSite(radius), law_of(SphericalSite(radius), dim)
    strength = torch.logspace(-2, 5, 50, dtype=dtype)  # R |h|
    field = torch.zeros(1, 50, dim, dtype=dtype)
    field[0, :, 0] = strength / radius
    mean = law.mean(field)
    found = law.field_of(mean)  # pyright: ignore[reportAttributeAccessIssue]
    allowed = (40 * strength * torch.finfo(dtype).eps).clamp_min(1e-12 if dtype == F64 else 1e-5)
    assert bool(((found / field - 1)[0, :, 0].abs() <= allowed).all())
    covariance = law.covariance(mean)
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    assert bool((variances > 0).all())
    exact = site.covariance(field.double(), torch.zeros(1, 50, dim, dim, dtype=F64))
    torch.testing.assert_close(
        covariance.double(), exact, rtol=0, atol=(1e-12 if dtype == F64 else 1e-4) * radius**2
    )

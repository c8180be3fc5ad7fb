"""Adaptive TAP against exact answers, and what it says where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.spin_models import (
    as_matrix,
    averaged_couplings,
    couplings,
    enumerate_moments,
    fields,
    generator,
    ising_states,
    potts_states,
)
from solvers import (
    GaussianSite,
    IsingSite,
    PottsSite,
    Site,
    Solution,
    SolveError,
    SolveWarning,
    SphericalSite,
    Status,
    adaptive_tap,
)

F64 = torch.float64
SITES = pytest.mark.parametrize(
    ("site", "dim"),
    [
        (IsingSite(), 1),
        (PottsSite(), 3),
        (SphericalSite(), 3),
        (GaussianSite(0.4 * torch.eye(2, dtype=F64)), 2),
    ],
    ids=["ising", "potts", "sphere", "gaussian"],
)


def relative_error(mean: Tensor, exact: Tensor) -> float:
    return ((mean.flatten() - exact).norm() / exact.norm()).item()


# --- exact answers -----------------------------------------------------------------------------------


def test_gaussian_sites_are_solved_exactly() -> None:
    sites, dim, random = 12, 4, generator(0)
    half = torch.randn(sites, dim, dim, generator=random, dtype=F64)
    sigma = half @ half.mT / dim + 0.3 * torch.eye(dim, dtype=F64)
    blocks = couplings(sites, dim, 0.02, random)
    x = fields(6, sites, dim, random, 1.0)
    precision = torch.block_diag(*torch.linalg.inv(sigma)) - as_matrix(blocks)
    assert torch.linalg.eigvalsh(precision)[0] > 0
    covariance = torch.linalg.inv(precision)
    solution = adaptive_tap(blocks, x, site=GaussianSite(sigma), response=True)
    assert solution.converged.all()
    value = solution.value
    torch.testing.assert_close(value.mean.flatten(1), x.flatten(1) @ covariance, rtol=0, atol=1e-9)
    whole = value.response.reshape(6, sites * dim, sites * dim)
    torch.testing.assert_close(whole, covariance.expand_as(whole), rtol=0, atol=1e-9)
    for i in range(sites):
        own = covariance[dim * i : dim * (i + 1), dim * i : dim * (i + 1)]
        torch.testing.assert_close(value.covariance[3, i], own, rtol=0, atol=1e-9)


# Largest ratio of the median errors. Where every J_ij is N(0, s^2/N) and s = 1, adaptive TAP itself
# stands at 0.11 of the naive error (300 models).
@pytest.mark.parametrize(("strength", "bound"), [(0.5, 0.1), (1.0, 0.15)])
def test_ising_against_enumeration(strength: float, bound: float) -> None:
    sites, random, states = 10, generator(1), ising_states(10)
    errors: dict[str, list[float]] = {"adaptive": [], "naive": []}
    for _ in range(20):
        blocks, x = couplings(sites, 1, strength / sites**0.5, random), fields(1, sites, 1, random)
        exact, _ = enumerate_moments(states, blocks, x[0])
        options: dict[str, Any] = {"tolerance": 1e-8, "on_failure": "ignore"}
        for order, found in errors.items():
            solution = adaptive_tap(blocks, x, site=IsingSite(), order=order, **options)
            if order == "adaptive":
                assert solution.converged.all()
                assert_consistent(solution, blocks, x, IsingSite())
            found.append(relative_error(solution.value.mean, exact))
    median = {order: torch.tensor(found).median().item() for order, found in errors.items()}
    assert median["adaptive"] <= bound * median["naive"]


def assert_consistent(solution: Solution, blocks: Tensor, x: Tensor, site: Site) -> None:
    """The TAP equations at the solution, by dense inverses."""
    mean, covariance, variance, *_ = solution.value
    pull = torch.einsum("ijab,sjb->sia", blocks, mean)
    h = x + pull - torch.einsum("siab,sib->sia", variance, mean)
    torch.testing.assert_close(mean, site.mean(h, variance), rtol=1e-6, atol=1e-7)
    precision = torch.diag_embed((variance + torch.linalg.inv(covariance)).flatten(1))
    precision = precision - as_matrix(blocks)
    assert (torch.linalg.eigvalsh(precision)[:, 0] > 0).all()
    own = torch.linalg.inv(precision).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(own, covariance.flatten(1), rtol=1e-5, atol=1e-7)


def test_strong_couplings_give_no_nan_and_an_honest_status() -> None:
    sites, random, seen = 10, generator(2), set[int]()
    for _ in range(15):
        blocks, x = couplings(sites, 1, 3.0 / sites**0.5, random), fields(1, sites, 1, random)
        solution = adaptive_tap(blocks, x, site=IsingSite(), on_failure="ignore", response=True)
        assert all(torch.isfinite(t).all() for t in solution.value if t is not None)
        assert solution.value.mean.abs().max() < 1.5
        seen.add(int(solution.status))
        if solution.converged.all():
            assert_consistent(solution, blocks, x, IsingSite())
        else:
            assert solution.residual > 1e-10
    assert int(Status.CONVERGED) in seen


def test_potts_beats_the_naive_mean_field_on_every_model() -> None:
    sites, dim, strength, random = 7, 3, 1.0, generator(3)
    states = potts_states(sites, dim)
    for _ in range(10):
        blocks = couplings(sites, dim, strength / sites**0.5, random)
        x = fields(1, sites, dim, random)
        exact, covariance = enumerate_moments(states, blocks, x[0])
        tap = adaptive_tap(blocks, x, site=PottsSite(), response=True)
        naive = adaptive_tap(blocks, x, site=PottsSite(), order="naive")
        assert tap.converged.all()
        error = relative_error(tap.value.mean, exact)
        assert error < 0.25 * relative_error(naive.value.mean, exact)
        got = tap.value.response.reshape_as(covariance)
        assert (got - covariance).norm() < 0.1 * strength * covariance.norm()


def test_spheres_against_monte_carlo() -> None:
    """Importance sampling from the uniform measure; errors of the estimate by the delta method."""
    sites, dim, random = 4, 3, generator(4)
    blocks, x = averaged_couplings(sites, dim, 0.4, random), fields(1, sites, dim, random)
    samples = torch.randn(300_000, sites, dim, generator=random, dtype=F64)
    samples = (dim**0.5 * samples / samples.norm(dim=2, keepdim=True)).flatten(1)
    energy = 0.5 * ((samples @ as_matrix(blocks)) * samples).sum(1) + samples @ x.flatten()
    weight = torch.softmax(energy, 0).unsqueeze(1)
    mean = (weight * samples).sum(0)
    bar = (weight * (samples - mean)).square().sum(0).sqrt()
    solution = adaptive_tap(blocks, x, site=SphericalSite())
    away = (solution.value.mean.flatten() - mean) / bar
    assert solution.converged.all()
    assert away.abs().max() < 3.5
    assert away.square().mean() < 2.5
    naive = adaptive_tap(blocks, x, site=SphericalSite(), order="naive").value.mean.flatten()
    assert ((naive - mean) / bar).square().mean() > 25  # the test can tell


# --- batches, masks, options -------------------------------------------------------------------------


@SITES
def test_each_sample_gets_what_it_gets_alone(site: Site, dim: int) -> None:
    random = generator(6)
    blocks, x = couplings(5, dim, 0.5 / dim**0.5, random), fields(6, 5, dim, random)
    x[0] *= 8  # the variances differ from sample to sample
    together = adaptive_tap(blocks, x, site=site, response=True, log_partition=True)
    for i in range(6):
        alone = adaptive_tap(blocks, x[i : i + 1], site=site, response=True, log_partition=True)
        for whole, single in zip(together.value, alone.value, strict=True):
            torch.testing.assert_close(whole[i], single[0], rtol=1e-8, atol=1e-9)
        assert together.evaluations[i] == alone.evaluations[0]
    if not isinstance(site, GaussianSite) and dim > 1:
        variance = together.value.cavity_variance
        assert (variance[0] - variance[1]).abs().max() > 1e-3


@SITES
def test_masked_sites_are_not_there(site: Site, dim: int) -> None:
    random = generator(7)
    blocks, x = couplings(5, dim, 0.4 / dim**0.5, random), fields(2, 5, dim, random)
    mask = torch.tensor([[True, False, True, True, False], [True] * 5])
    value = adaptive_tap(blocks, x, site=site, mask=mask, response=True).value
    kept = torch.nonzero(mask[0]).flatten()
    part = adaptive_tap(blocks[kept][:, kept], x[:1, kept], site=site, response=True).value
    for got, wanted in zip(value[:3], part[:3], strict=True):
        torch.testing.assert_close(got[0, kept], wanted[0], rtol=1e-8, atol=1e-9)
        assert not got[0, ~mask[0]].any()
    inside = value.response[0][kept][:, :, kept]
    torch.testing.assert_close(inside, part.response[0], rtol=1e-8, atol=1e-9)
    full = adaptive_tap(blocks, x[1:], site=site).value
    torch.testing.assert_close(value.mean[1], full.mean[0], rtol=1e-8, atol=1e-9)


def test_an_indefinite_start_is_raised_until_it_is_definite() -> None:
    """A ferromagnet at V = 0 has an indefinite response; the solution has not."""
    sites = 8
    blocks = 1.5 * (1 - torch.eye(sites, dtype=F64))[:, :, None, None] / sites
    x = torch.full((1, sites, 1), 0.3, dtype=F64)
    assert torch.linalg.eigvalsh(torch.eye(sites, dtype=F64) - blocks[..., 0, 0])[0] < 0
    solution = adaptive_tap(blocks, x, site=IsingSite())
    assert solution.converged.all()
    exact, _ = enumerate_moments(ising_states(sites), blocks, x[0])
    assert relative_error(solution.value.mean, exact) < 0.05


# --- statuses ------------------------------------------------------------------------------------------


def test_a_model_that_does_not_exist_is_indefinite() -> None:
    """Gaussian sites whose coupled distribution cannot be normalised."""
    random, site = generator(12), GaussianSite(torch.eye(2, dtype=F64))
    blocks, x = couplings(4, 2, 2.0, random), fields(3, 4, 2, random)
    with pytest.warns(SolveWarning, match="INDEFINITE 3 of 3"):
        solution = adaptive_tap(blocks, x, site=site, response=True)
    assert (solution.status == Status.INDEFINITE).all()
    assert torch.isinf(solution.residual).all() and not solution.value.mean.any()
    assert all(torch.isfinite(t).all() for t in solution.value if t is not None)
    with pytest.raises(SolveError) as caught:
        adaptive_tap(blocks, x, site=site, on_failure="raise")
    assert (caught.value.solution.status == Status.INDEFINITE).all()


class Exponential(Site):
    """``rho(S) = exp(-S)`` on S > 0: it exists for fields below 1 (V left out)."""

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        return -torch.log1p(-field).sum(-1)


def test_one_bad_sample_leaves_the_gradients_of_the_others_alone() -> None:
    random = generator(13)
    blocks = couplings(4, 1, 0.05, random).requires_grad_()
    x = fields(3, 4, 1, random, 0.2)
    x[1, 2] = 1.5
    site = Exponential()
    solution = adaptive_tap(blocks, x, site=site, on_failure="ignore")
    assert solution.status.tolist() == [Status.CONVERGED, Status.INDEFINITE, Status.CONVERGED]
    (got,) = torch.autograd.grad(solution.value.mean[[0, 2]].square().sum(), blocks)
    alone = adaptive_tap(blocks, x[[0, 2]], site=site)
    (wanted,) = torch.autograd.grad(alone.value.mean.square().sum(), blocks)
    torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-10)


def test_a_spent_budget_is_said() -> None:
    random = generator(14)
    blocks, x = couplings(6, 3, 0.5, random), fields(2, 6, 3, random)
    solution = adaptive_tap(
        blocks, x, site=PottsSite(), max_steps=3, on_failure="ignore", record=True
    )
    assert (solution.status == Status.MAX_STEPS).all()
    assert (solution.evaluations == 3).all()
    assert solution.trace is not None
    assert solution.trace.residual.shape == (2, 3)


# --- errors -----------------------------------------------------------------------------------------


def with_one(value: float, *place: int) -> Tensor:
    blocks = torch.zeros(3, 3, 2, 2, dtype=F64)
    blocks[place] = value
    return blocks


GOOD = torch.zeros(3, 3, 2, 2, dtype=F64)
X = torch.zeros(2, 3, 2, dtype=F64)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"couplings": with_one(1.0, 0, 2, 0, 1)}, ValueError, r"symmetric.*1\.0.*couplings\[0, 2\]"),
    ({"couplings": with_one(0.5, 1, 1)}, ValueError, r"zero diagonal blocks.*0\.5.*couplings\[1, 1\]"),
    ({"couplings": GOOD / 0}, ValueError, "couplings must be finite"),
    ({"couplings": GOOD[:2]}, ValueError, r"\(3, 3, 2, 2\).*got \(2, 3, 2, 2\)"),
    ({"couplings": GOOD.float()}, TypeError, "couplings must be like field"),
    ({"field": X[0]}, ValueError, r"field must have the shape \(B, N, d\)"),
    ({"field": X / 0}, ValueError, r"field must be finite.*\[0, 1\]"),
    ({"site": 3}, TypeError, "site must be a solvers.Site"),
    ({"mask": torch.ones(2, 3)}, TypeError, r"mask must be a bool tensor .*torch.float32$"),
    ({"mask": torch.ones(2, 2, dtype=torch.bool)}, ValueError,
        r"mask must have the shape \(2, 3\)"),
    ({"damping": 0.0}, ValueError, "damping"),
    ({"damping": "auto"}, TypeError, "damping"),
    ({"order": "third"}, ValueError, "order must be one of"),
    ({"inverse_temperature": 0}, ValueError, "inverse_temperature must be > 0"),
    ({"inverse_temperature": ()}, ValueError, "inverse_temperature must hold"),
    ({"inverse_temperature": torch.tensor([0.1, 1.0])}, TypeError, r"of a tensor .*tolist\(\)"),
    ({"start": torch.zeros(2, 3, 2)}, TypeError, "start must be a SpinState"),
    ({"response": 1}, TypeError, "response"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_errors_name_the_argument(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    arguments = {"couplings": GOOD, "field": X, "site": PottsSite()} | change
    with pytest.raises(error, match=words):
        adaptive_tap(**arguments)


def test_means_of_potts_sites_sum_to_one_at_any_tolerance() -> None:
    blocks, x = couplings(5, 3, 0.4, generator(0)), fields(2, 5, 3, generator(1), 1.0)
    found = adaptive_tap(blocks, x, site="potts", damping=0.3, tolerance=1e-2)
    assert found.converged.all()
    torch.testing.assert_close(found.value.mean.sum(-1), torch.ones(2, 5, dtype=F64))


# how far the means of a sample lie outside, (B,)
OUTSIDE: dict[str, tuple[Site, int, Callable[[Tensor], Tensor]]] = {
    "ising": (IsingSite(), 1, lambda m: m.abs().amax((1, 2)) - 1),
    "potts": (PottsSite(), 3, lambda m: torch.maximum(-m, m - 1).amax((1, 2))),
    "sphere": (SphericalSite(), 3, lambda m: m.norm(dim=-1).amax(1) - 3**0.5),
}


@pytest.mark.defect("D6")
@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize(("order", "max_steps"), [("adaptive", 3), ("naive", 10)])
def test_unconverged_means_stay_in_the_domain(name: str, order: str, max_steps: int) -> None:
    site, dim, outside = OUTSIDE[name]
    unconverged = 0
    for strength in (1.0, 4.0):
        random = generator(1)
        blocks = couplings(20, dim, strength / (20 * dim) ** 0.5, random)
        x = fields(8, 20, dim, random, 1.0)
        options = {"max_steps": max_steps, "order": order, "on_failure": "ignore"}
        solution = adaptive_tap(blocks, x, site=site, adjoint=None, **options)
        unconverged += int((~solution.converged).sum())
        assert (outside(solution.value.mean) <= 1e-12).all()
    assert unconverged


@pytest.mark.parametrize(
    ("site", "dim", "order"), [(PottsSite(), 3, "naive"), (SphericalSite(), 3, "adaptive")]
)
def test_no_adjoint_means_no_gradient_of_anything(site: Site, dim: int, order: str) -> None:
    """The covariance at a fixed state would have a gradient, but half of the true one."""
    random = generator(0)
    every: Any = {"response": True, "log_partition": True}
    blocks = couplings(4, dim, 0.2, random).requires_grad_()
    x = fields(3, 4, dim, random).requires_grad_()
    value = adaptive_tap(blocks, x, site=site, adjoint=None, order=order, **every).value
    assert not any(tensor.requires_grad for tensor in value)

"""Log partition functions of the mean-field theories, warm starts, clamped sites, annealing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.spin_models import as_matrix, couplings, fields, generator, potts_states, symmetric
from solvers import (
    GaussianSite,
    Implicit,
    IsingSite,
    PottsSite,
    Site,
    SolveWarning,
    SphericalSite,
    SpinState,
    adaptive_tap,
)

F64 = torch.float64
ORDERS = pytest.mark.parametrize("order", ["naive", "second", "adaptive"])
TIGHT: dict[str, Any] = {"tolerance": 1e-13, "max_steps": 400}
SITES: dict[str, tuple[Site, int]] = {
    "ising": (IsingSite(), 1),
    "potts": (PottsSite(), 3),
    "sphere": (SphericalSite(), 3),
    "gaussian": (GaussianSite(0.5 * torch.eye(2, dtype=F64)), 2),
    "gaussian each": (GaussianSite(torch.diag_embed(torch.rand(4, 2, dtype=F64) + 0.1)), 2),
    "saddle point": (SphericalSite(large_dimension=True), 4),
}
MASK = torch.tensor([[True, True, False, True], [True] * 4])


def model(dim: int, scale: float = 0.3, sites: int = 4) -> tuple[Tensor, Tensor]:
    random = generator(3)
    blocks = couplings(sites, dim, scale / dim**0.5, random)
    return blocks, fields(2, sites, dim, random)


def exact_log_partition(states: Tensor, blocks: Tensor, field: Tensor) -> Tensor:
    """By enumeration, priors of weight 1; ``field`` (N, d)."""
    energy = 0.5 * ((states @ as_matrix(blocks)) * states).sum(1) + states @ field.flatten()
    return torch.logsumexp(energy, 0) - math.log(len(states))


@ORDERS
@pytest.mark.parametrize("name", [name for name in SITES if name != "gaussian"])
def test_the_slope_of_log_z_is_the_mean(name: str, order: str) -> None:
    site, dim = SITES[name]
    options = TIGHT | {"site": site, "order": order, "mask": MASK, "log_partition": True}
    blocks, x = model(dim)
    x.requires_grad_()
    solution = adaptive_tap(blocks, x, **options)
    value = solution.value
    (slope,) = torch.autograd.grad(value.log_partition.sum(), x)
    torch.testing.assert_close(slope, value.mean, rtol=0, atol=1e-10)
    adjoint = solution.adjoint.solution
    assert adjoint is None or not adjoint.evaluations.any()
    if name == "saddle point" and order != "naive":
        return  # no distribution: only up to O(1/d)
    step, along = 1e-4, fields(2, 4, dim, generator(8), 1.0)
    there, back = (
        adaptive_tap(blocks, x.detach() + by, **options).value.log_partition
        for by in (step * along, -step * along)
    )
    wanted = (slope * along).flatten(1).sum(1)
    torch.testing.assert_close((there - back) / (2 * step), wanted, rtol=1e-6, atol=1e-8)


def test_log_z_against_enumeration() -> None:
    (site, dim), states = SITES["potts"], potts_states(5, 3)
    found: dict[str, list[float]] = {}
    for seed in range(8):
        random = generator(seed)
        blocks, x = couplings(5, dim, 0.4 / 5**0.5, random), fields(1, 5, dim, random)
        exact = exact_log_partition(states, blocks, x[0])
        for order in ("naive", "second", "adaptive"):
            value = adaptive_tap(blocks, x, site=site, order=order, log_partition=True).value
            error = (value.log_partition[0] - exact).abs().item()
            found.setdefault(order, []).append(error)
    median = {order: torch.tensor(errors).median().item() for order, errors in found.items()}
    assert median["second"] < 0.1 * median["naive"]
    assert median["adaptive"] < 0.1 * median["naive"]
    assert median["adaptive"] < 2e-3


def test_gaussian_sites_are_exact() -> None:
    blocks, x = model(2)
    sigma = 0.5 * torch.eye(2, dtype=F64)
    value = adaptive_tap(blocks, x, site=GaussianSite(sigma), log_partition=True).value
    inverse = torch.block_diag(*[torch.linalg.inv(sigma)] * 4)
    precision = inverse - as_matrix(blocks)
    flat = x.flatten(1)
    wanted = (flat * torch.linalg.solve(precision, flat.mT).mT).sum(1) / 2
    wanted = wanted + (torch.logdet(inverse) - torch.logdet(precision)) / 2
    torch.testing.assert_close(value.log_partition, wanted, rtol=1e-10, atol=0)


def test_second_order_is_plefkas_expansion() -> None:
    """Ising sites: ``m = tanh(theta)`` with the reaction term, and the free energy of their V = 0 fields."""
    blocks, x = model(1, 0.5)
    value = adaptive_tap(blocks, x, site=IsingSite(), order="second", log_partition=True).value
    m, j = value.mean[..., 0], blocks[..., 0, 0]
    theta = x[..., 0] + m @ j - m * ((1 - m**2) @ j**2)
    torch.testing.assert_close(m, theta.tanh(), rtol=0, atol=1e-9)
    own = theta.cosh().log() - theta * m + x[..., 0] * m
    pairs = ((1 - m**2) @ j**2 * (1 - m**2)).sum(1) / 4 + (m @ j * m).sum(1) / 2
    torch.testing.assert_close(value.log_partition, own.sum(1) + pairs, rtol=0, atol=1e-9)


# --- warm starts, clamped sites, annealing ---------------------------------------------------------


@ORDERS
@pytest.mark.parametrize("name", ["potts", "gaussian"])
def test_a_warm_start_saves_evaluations(name: str, order: str) -> None:
    site, dim = SITES[name]
    blocks, x = model(dim, 0.5)
    cold = adaptive_tap(blocks, x, site=site, order=order)
    near = adaptive_tap(blocks, x + 1e-4, site=site, order=order).value
    for start in (near, SpinState(near.mean, near.cavity_variance)):
        warm = adaptive_tap(blocks, x, site=site, order=order, start=start)
        assert warm.converged.all()
        if name == "potts" or order != "adaptive":  # else one Newton step, from anywhere
            assert (warm.evaluations < cold.evaluations).all()
        torch.testing.assert_close(warm.value.mean, cold.value.mean, rtol=0, atol=1e-8)


@ORDERS
def test_annealing_ends_at_the_last_temperature_and_counts_all(order: str) -> None:
    blocks, x = model(3, 0.5)
    options: dict[str, Any] = {"site": PottsSite(), "order": order, "log_partition": True}
    x.requires_grad_()
    wanted = adaptive_tap(2.0 * blocks, 2.0 * x, **options, **TIGHT)
    got = adaptive_tap(blocks, x, inverse_temperature=(0.5, 1.0, 2.0), **options, **TIGHT)
    hot = adaptive_tap(blocks, x, inverse_temperature=0.5, **options, **TIGHT)
    for first, second in zip(got.value, wanted.value, strict=True):
        if first is not None:
            torch.testing.assert_close(first, second, rtol=0, atol=1e-9)
    (slope,) = torch.autograd.grad(got.value.log_partition.sum(), x)
    torch.testing.assert_close(slope, 2 * got.value.mean, rtol=0, atol=1e-9)
    assert (got.evaluations > wanted.evaluations).all()
    assert (got.evaluations > hot.evaluations).all()


@ORDERS
@pytest.mark.parametrize("name", ["potts", "gaussian"])
def test_clamped_sites_act_as_fields(name: str, order: str) -> None:
    site, dim = SITES[name]
    blocks, x = model(dim)
    values = torch.full((2, 4, dim), torch.nan, dtype=F64)
    values[:, 1] = torch.eye(max(dim, 2), dtype=F64)[0, :dim]
    clamped = torch.tensor([[False, True, False, False]] * 2)
    options: dict[str, Any] = {"site": site, "order": order, "log_partition": True}
    got = adaptive_tap(blocks, x, given=(values, clamped), response=True, **options, **TIGHT).value
    kept = torch.tensor([0, 2, 3])
    pull = torch.einsum("iab,sb->sia", blocks[kept, 1], values[:, 1])
    rest = adaptive_tap(blocks[kept][:, kept], x[:, kept] + pull, **options, **TIGHT).value
    torch.testing.assert_close(got.mean[:, kept], rest.mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(got.mean[:, 1], values[:, 1])
    assert not got.covariance[:, 1].any() and not got.response[:, 1].any()
    energy = (x[:, 1] * values[:, 1]).sum(1)
    wanted = rest.log_partition + energy
    torch.testing.assert_close(got.log_partition, wanted, rtol=0, atol=1e-9)


def test_gradients_of_clamped_models() -> None:
    blocks, x = model(2)
    raw, x = blocks[:, :, :2, :2].clone().requires_grad_(), x.requires_grad_()
    values = torch.rand(2, 4, 2, generator=generator(4), dtype=F64).requires_grad_()
    clamped = torch.tensor([[True, False, False, True], [False, True, True, False]])
    mask = torch.tensor([[True] * 4, [True, True, False, True]])

    def solve(raw: Tensor, x: Tensor, values: Tensor) -> Tensor:
        value = adaptive_tap(
            symmetric(raw),
            x,
            site=PottsSite(),
            given=(values, clamped),
            mask=mask,
            log_partition=True,
            inverse_temperature=(0.7, 1.3),
            adjoint=Implicit(tolerance=1e-12),
            **TIGHT,
        ).value
        return value.log_partition.sum() + value.mean.square().sum()

    assert torch.autograd.gradcheck(solve, (raw, x, values), fast_mode=True)
    assert torch.autograd.gradgradcheck(solve, (raw, x, values), fast_mode=True, atol=1e-4)


@ORDERS
def test_gradients_with_an_inverse_temperature_and_of_pairs(order: str) -> None:
    blocks, x = model(3)
    blocks.requires_grad_()
    x.requires_grad_()
    options: dict[str, Any] = {"site": PottsSite(), "order": order, "log_partition": True}
    found = adaptive_tap(
        blocks, x, inverse_temperature=0.7, response=order == "adaptive", **options, **TIGHT
    ).value
    of_blocks, of_x = torch.autograd.grad(found.log_partition.sum(), (blocks, x))
    torch.testing.assert_close(of_x, 0.7 * found.mean, rtol=0, atol=1e-9)
    products = torch.einsum("sia,sjb->ijab", found.mean, found.mean)
    if order == "adaptive":
        assert found.response is not None
        products = products + found.response.sum(0).permute(0, 2, 1, 3)
    if order == "second":
        c = found.covariance
        products = products + 0.7 * torch.einsum("siac,ijcd,sjdb->ijab", c, blocks, c)
    apart = ~torch.eye(4, dtype=torch.bool)
    torch.testing.assert_close(of_blocks[apart], 0.35 * products[apart], rtol=0, atol=1e-9)


def test_a_warning_says_which_theory_failed() -> None:
    blocks, x = model(1, 3.0)
    with pytest.warns(SolveWarning, match="second-order TAP solve"):
        adaptive_tap(blocks, x, site=IsingSite(), order="second", max_steps=2)

"""Steady states of spins in time, and the dynamics themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.spin_models import generator
from solvers import (
    Implicit,
    IsingSite,
    PottsSite,
    Site,
    SphericalSite,
    glauber,
    kinetic_step,
    kinetic_trajectory,
    steady_state,
)

F64 = torch.float64
LARGE = SphericalSite(1.4, large_dimension=True)
TIGHT: dict[str, Any] = {"tolerance": 1e-11, "max_steps": 200}


def network(dim: int, apart: bool = False, scale: float = 0.2) -> tuple[Tensor, Tensor]:
    """Fields (2, 3, d), and couplings that samples share or have apart."""
    field = torch.randn(2, 3, dim, generator=generator(0), dtype=F64)
    shape = (2, 3, 3) if apart else (3, 3)
    return field, scale * torch.randn(shape, generator=generator(1), dtype=F64)


CASES = [
    (IsingSite(), 1, "gaussian"),
    (IsingSite(), 1, "tap"),
    (PottsSite(), 3, "tap"),
    (LARGE, 3, "naive"),
    (LARGE, 3, "gaussian"),
    (LARGE, 3, "plefka"),
]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("site", "dim", "closure"), CASES)
def test_a_step_leaves_it_as_it_is(site: Site, dim: int, closure: str, apart: bool) -> None:
    """And the trajectory from elsewhere ends there."""
    field, j = network(dim, apart)
    found = steady_state(field, j, site=site, closure=closure, **TIGHT)
    assert bool(found.converged.all())
    after = kinetic_step(found.value, field, j, site=site, closure=closure)
    torch.testing.assert_close(after, found.value, rtol=1e-8, atol=1e-8)
    start = torch.full_like(field, 1 / dim)
    last = kinetic_trajectory(start, field, j, steps=20, site=site, closure=closure)[-1]
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


def test_samples_are_apart_and_masks_count() -> None:
    field, j = network(3, apart=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    start = torch.full_like(field, 0.1)
    options: dict[str, Any] = {"site": LARGE, "start": start, **TIGHT}
    found = steady_state(field, j, mask=mask, **options).value
    assert torch.equal(found[0, 2], start[0, 2])
    small = steady_state(field[:1, :2], j[:1, :2, :2], site=LARGE, **TIGHT).value
    torch.testing.assert_close(found[:1, :2], small)
    alone = steady_state(field[1:], j[1:], site=LARGE, **TIGHT).value
    torch.testing.assert_close(found[1:], alone)


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


def test_a_seed_gives_the_same_dynamics_again() -> None:
    spins, field, j = torch.ones(5, 3, 1), torch.zeros(3, 1), torch.zeros(3, 3)
    state = torch.random.get_rng_state()
    first, again = (
        glauber(spins, field, j, steps=4, site=IsingSite(), generator=generator(0))
        for _ in range(2)
    )
    assert torch.equal(first.spins, again.spins) and torch.equal(first.means, again.means)
    assert first.means.shape == (5, 3, 1) and first.spins.shape == (5, 3, 1)
    assert torch.equal(torch.random.get_rng_state(), state)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"spins": torch.ones(3, 1)}, ValueError, r"spins must have the shape \(chains, N, d\)"),
    ({"field": torch.ones(5, 3, 1)}, ValueError, r"field must have the shape \(N, d\)"),
    ({"couplings": torch.zeros(5, 3, 3)}, ValueError, r"couplings must have the shape \(N, N\)"),
    ({"spins": torch.ones(5, 3, 1, dtype=torch.int64)}, TypeError,
        "spins must be a floating tensor"),
    *(({name: torch.full(shape, math.nan)}, ValueError, f"{name} must be finite") for name,
        shape in (("spins", (5, 3, 1)), ("field", (3, 1)), ("couplings", (3, 3)))),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_mistakes(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {
        "spins": torch.ones(5, 3, 1),
        "field": torch.zeros(3, 1),
        "couplings": torch.zeros(3, 3),
        "steps": 1,
        "site": IsingSite(),
    } | changes
    with pytest.raises(error, match=message):
        glauber(given.pop("spins"), given.pop("field"), given.pop("couplings"), **given)

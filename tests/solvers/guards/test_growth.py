"""Energies without a minimum are called diverged; far minima, of any scale, are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from solvers import LBFGS, Anderson, Descent, GradientDescent, Solver, fixed_point

SOLVERS: list[Solver] = [LBFGS(), Anderson(), GradientDescent()]


def linear(z: Tensor) -> Tensor:
    return -z.flatten(1).sum(1)


@pytest.mark.defect("A12")
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_no_budget_makes_a_constant_force_converge(solver: Solver) -> None:
    z0 = torch.linspace(-1, 1, 6).reshape(2, 3)
    for steps in (20, 1000):
        options: Any = {"max_steps": steps, "on_failure": "ignore", "solver": solver}
        assert not fixed_point(Descent(linear, 30.0), z0, **options).converged.any()


@pytest.mark.defect("A12")
def test_a_sample_that_runs_away_leaves_the_others_alone() -> None:
    curvature = torch.tensor([[-0.1], [1.0], [0.5]])
    f = Descent(lambda z, c: (0.5 * c * z**2 - z).sum(1))
    solution = fixed_point(f, torch.zeros(3, 2), (curvature,), on_failure="ignore")
    assert solution.status.tolist() == [3, 0, 0]


UNBOUNDED: dict[str, tuple[Any, float]] = {  # energy, start: the force falls early, or slowly
    "bump_then_linear": (lambda z: -(1 + z * z).sqrt().sum(1) + 3 * torch.exp(-z * z).sum(1), 0.5),
    "bump_then_flatter": (lambda z: -0.4 * z.sum(1) + 3 * torch.exp(-z * z).sum(1), 0.5),
    "power": (lambda z: -((1 + z * z) ** 0.45).sum(1), 1.0),
    "root": (lambda z: -((1 + z * z) ** 0.25).sum(1), 1.0),
}


@pytest.mark.defect("A12")
@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_force_that_fell_less_than_the_state_grew_is_no_minimum(name: str) -> None:
    energy, start = UNBOUNDED[name]
    z0 = torch.full((2, 3), start)
    solution = fixed_point(Descent(energy), z0, max_steps=200, on_failure="ignore")
    assert solution.counts() == {"DIVERGED": 2}


def double_well(z: Tensor) -> Tensor:
    return 0.25 * ((z * z - 1) ** 2).sum(1)


@pytest.mark.defect("A12")
def test_a_slow_start_at_a_saddle_point_is_no_divergence() -> None:
    f, z0 = Descent(double_well, 0.1), torch.full((1, 2), 1e-8)
    options: Any = {"solver": GradientDescent(), "on_failure": "ignore"}
    for steps in (60, 140, 240):
        counts = fixed_point(f, z0, max_steps=steps, **options).counts()
        assert "DIVERGED" not in counts, steps


@pytest.mark.defect("A12")
def test_a_weak_force_that_falls_is_no_divergence() -> None:
    """On the way to a minimum a million times farther than the start, almost there."""
    f = Descent(lambda z: (5e-7 * z * z - z).sum(1))
    z0 = torch.zeros(1, 2, dtype=torch.float64)
    options: Any = {"solver": GradientDescent(4e5), "on_failure": "ignore"}
    assert fixed_point(f, z0, max_steps=8, **options).counts() == {"MAX_STEPS": 1}
    assert fixed_point(f, z0, max_steps=100, **options).converged.all()


FAR: dict[str, Any] = {
    "far_quadratic": lambda z: (0.5 * (z - 1e6) ** 2).sum(1),
    "weak_quadratic": lambda z: (5e-4 * (z - 1e3) ** 2).sum(1),
    "well_from_its_top": lambda z: (0.25 * z**4 - 0.5 * 1e4 * z**2).sum(1) * 1e-4,
    "log_cosh": lambda z: (torch.nn.functional.softplus(z - 50) - 0.4 * z).sum(1),
    "large_energy": lambda z: 1e12 + (0.5 * (z - 3) ** 2).sum(1),
}


@pytest.mark.parametrize("name", FAR)
def test_far_minima_are_no_divergence(name: str) -> None:
    z0 = torch.full((2, 3), 1e-3, dtype=torch.float64)
    energy = FAR[name]
    solution = fixed_point(Descent(energy), z0, max_steps=400, on_failure="ignore")
    assert solution.converged.all(), solution.summary()
    z = solution.value.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(z).sum(), z)
    assert (gradient.norm(dim=1) <= 1.001e-4 * z.norm(dim=1)).all()

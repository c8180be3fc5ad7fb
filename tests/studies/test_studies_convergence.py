"""Budgets from one solve, solvers side by side, and eigenvalues that are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases.deq import make, tokens
from implicit_attn import DEQ, GradientStep
from implicit_attn.energies import FunctionEnergy
from implicit_attn.studies import (
    jacobian_eigenvalues,
    returned_within,
    solver_choices,
    solver_costs,
    solver_curves,
)
from solvers import Anderson, Forward, Tolerance

EXACT = Tolerance(rtol=0.0)
CURVATURES = torch.tensor([0.2, 0.5, 1.5], dtype=torch.float64)


def bowl(z: Tensor, x: Tensor) -> Tensor:
    """A quadratic energy with the curvatures ``CURVATURES`` in each token."""
    return 0.5 * (CURVATURES * (z - x).square()).sum((1, 2))


def bowl_layer(step_size: float = 1.0) -> DEQ:
    return DEQ(GradientStep(FunctionEnergy(bowl), step_size), init="zeros")


def rows(batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(batch, 2, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", ["gradient", "channels", "update", "mean_field"])
def test_one_solve_tells_what_every_budget_returns(name: str) -> None:
    layer, x = make(name), 3 * tokens(batch=7)
    budgets = [1, 2, 5, 9, 20, 120]
    for solver in (None, Forward(), Anderson(memory=3)):
        found = returned_within(layer, x, budgets, solver=solver)
        for budget, each in zip(budgets, found, strict=True):
            options: dict[str, Any] = {} if solver is None else {"solver": solver}
            with torch.no_grad():
                expected = layer.solve(
                    x, max_steps=budget, tolerance=EXACT, on_failure="ignore", **options
                )
            assert torch.equal(each.value, expected.value)
            assert torch.equal(each.residual, expected.residual)
            assert (each.energy is None) == (expected.energy is None)
            if each.energy is not None and expected.energy is not None:
                assert torch.equal(each.energy, expected.energy)


def test_finished_samples_keep_what_they_have() -> None:
    """Samples that end at different times leave the batch, the others keep their rows."""
    layer, x = make("gradient"), tokens(batch=40)
    x = x * torch.logspace(-3, 1, 40, dtype=torch.float64)[:, None, None]
    budgets = [3, 4, 5, 6, 7, 8, 40]
    found = returned_within(layer, x, budgets, rtol=1e-4)
    for budget, each in zip(budgets, found, strict=True):
        with torch.no_grad():
            expected = layer.solve(
                x, max_steps=budget, tolerance=Tolerance(rtol=1e-4), on_failure="ignore"
            )
        assert torch.equal(each.value, expected.value)
    ended = [int((each.residual <= 1e-4).sum()) for each in found]
    assert ended[-1] == 40 and any(0 < number < 40 for number in ended)


def test_choices_depend_on_the_energy() -> None:
    monitored, plain = solver_choices(make("gradient")), solver_choices(make("update"))
    assert {"forward", "plain forward", "L-BFGS", "Newton"} <= set(monitored)
    assert set(plain) == {"plain forward", "Anderson", "Broyden", "Newton"}
    assert not monitored["plain forward"][0].update.monitored


def test_curves_and_costs() -> None:
    layer, x = bowl_layer(), rows(5)
    curves = solver_curves(layer, x, max_steps=40, floor=1e-9)
    ends, steps = solver_costs(layer, x, Tolerance(rtol=1e-6), max_steps=40, repeats=1)
    names = list(solver_choices(layer))
    assert list(dict.fromkeys(row["solver"] for row in curves)) == names
    assert [row["solver"] for row in ends] == names
    for name in names:
        mine = [row for row in curves if row["solver"] == name]
        residuals = [row["residual"] for row in mine]
        assert residuals == sorted(residuals, reverse=True) and residuals[-1] >= 1e-9
        above = [row["energy_above"] for row in mine]
        if name == "plain forward":
            assert above == [None] * len(mine)
        else:
            assert min(above) >= 0.0
        assert sum(row["samples"] for row in steps if row["solver"] == name) == len(x)
    fast = next(row for row in ends if row["solver"] == "L-BFGS")
    slow = next(row for row in ends if row["solver"] == "plain forward")
    assert fast["converged"] == 1.0 and fast["evaluations"] <= 12
    # The slowest mode shrinks by 0.8 a step: 1e-6 is not there within 40.
    assert slow["converged"] == 0.0 and slow["evaluations"] == 40


@pytest.mark.parametrize("step_size", [1.0, 0.5])
def test_eigenvalues_of_a_gradient_step(step_size: float) -> None:
    x = rows(2)
    table = jacobian_eigenvalues(bowl_layer(step_size), x, x)
    expected = sorted([1 - step_size * c for c in CURVATURES.tolist()] * 2)
    for sample in (0, 1):
        mine = [row for row in table if row["sample"] == sample]
        assert [row["real"] for row in mine] == pytest.approx(expected)
        assert all(row["imaginary"] == 0.0 for row in mine)
        curvatures = sorted(row["curvature"] for row in mine)
        assert curvatures == pytest.approx(sorted([0.2, 0.5, 1.5] * 2))


def test_eigenvalues_of_a_rotation() -> None:
    """``z <- 0.9 R z + x`` turns by 60 degrees: complex eigenvalues of modulus 0.9."""
    half, root = 0.5, 0.75**0.5
    turn = 0.9 * torch.tensor([[half, -root], [root, half]], dtype=torch.float64)
    layer = DEQ.from_update(lambda z, x: z @ turn.T + x)
    x = rows(1)[:, :1, :2]
    table = jacobian_eigenvalues(layer, x, x)
    assert [row["real"] for row in table] == pytest.approx([0.45, 0.45])
    assert sorted(row["imaginary"] for row in table) == pytest.approx([-0.9 * root, 0.9 * root])
    assert "curvature" not in table[0]

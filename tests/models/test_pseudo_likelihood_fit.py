"""Fits by pseudo-likelihood: what the record says, and that it is true."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_attn.models import PottsModel, fit_pseudolikelihood


def data(samples: int = 60) -> Tensor:
    """Four sites of three colours; the second follows the first, nine times in ten."""
    generator = torch.Generator().manual_seed(0)
    s = torch.randint(3, (samples, 4), generator=generator)
    follow = torch.rand(samples, generator=generator) < 0.9
    s[:, 1] = torch.where(follow, s[:, 0], s[:, 1])
    return s


def test_a_converged_fit_is_at_the_minimum() -> None:
    model = PottsModel(4, 3).double()
    fit = fit_pseudolikelihood(model, data(), 0.01, steps=200, tolerance=1e-6)
    assert fit.status == "converged" and fit.gradient <= 1e-6
    objective = model.pseudo_likelihood(data()) + 0.01 * model.penalty()
    gradients = torch.autograd.grad(objective, list(model.parameters()))
    assert max(float(each.abs().max()) for each in gradients) < 1e-6
    assert math.isclose(fit.losses[-1], float(objective.detach()), rel_tol=1e-9)
    assert fit.losses[0] == pytest.approx(math.log(3))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_too_few_steps_are_called_so() -> None:
    fit = fit_pseudolikelihood(PottsModel(4, 3), data(), 0.01, steps=2)
    assert (fit.status, fit.steps, fit.converged) == ("max_steps", 2, False)
    assert fit.gradient > 1e-5


@pytest.mark.parametrize("schedule", ["one-cycle", "constant"])
def test_adam_finds_the_same_minimum(schedule: str) -> None:
    exact, model = PottsModel(4, 3), PottsModel(4, 3)
    fit_pseudolikelihood(exact, data(), 0.01, steps=100)
    seen: list[tuple[int, float]] = []
    fit = fit_pseudolikelihood(
        model, data(), 0.01, "adam", steps=300, schedule=schedule,
        watch=lambda step, loss: seen.append((step, loss)),
    )  # fmt: skip
    assert fit.status == "max_steps" and math.isnan(fit.gradient)
    torch.testing.assert_close(model.couplings.weight, exact.couplings.weight, atol=2e-2, rtol=0)
    assert seen == list(enumerate(fit.losses, 1)) and len(seen) == 300


@pytest.mark.parametrize("solver", ["lbfgs", "adam"])
def test_a_loss_that_is_not_finite_is_told_and_changes_nothing(solver: str) -> None:
    model = PottsModel(4, 3)
    with torch.no_grad():
        model.field[0, 0] = float("nan")
    fit = fit_pseudolikelihood(model, data(), solver=solver)
    assert fit.status == "nonfinite"
    assert not bool(model.couplings.free.any())


class Breaks(PottsModel):
    """A penalty that is not finite where couplings are large: fits run into it."""

    def __init__(self, value: float, limit: float = 0.05) -> None:
        super().__init__(4, 3)
        self.value, self.limit = value, limit

    def penalty(self) -> Tensor:
        size = super().penalty()
        return torch.where(size > self.limit, self.value * size.detach(), size)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_line_search_steps_back_from_what_is_not_finite(value: float) -> None:
    model = Breaks(value)
    fit = fit_pseudolikelihood(model, data(), 1e-3, steps=20)
    assert any(not math.isfinite(loss) for loss in fit.losses)
    finite = [loss for loss in fit.losses if math.isfinite(loss)]
    assert fit.status in ("stalled", "max_steps", "nonfinite") and min(finite) < finite[0]
    objective = model.pseudo_likelihood(data()) + 1e-3 * model.penalty()
    assert float(objective.detach()) == pytest.approx(min(finite), rel=1e-5)


@pytest.mark.parametrize("solver", ["lbfgs", "adam"])
def test_a_model_without_free_parameters_is_refused(solver: str) -> None:
    with pytest.raises(ValueError, match="model must have a parameter"):
        fit_pseudolikelihood(PottsModel(4, 3).requires_grad_(False), data(), solver=solver)


def test_batches_are_seeded_and_leave_the_random_state() -> None:
    found, models = [], [PottsModel(4, 3) for _ in range(3)]
    state = torch.random.get_rng_state()
    for seed, model in zip((0, 0, 1), models, strict=True):
        options: dict[str, Any] = {"steps": 5, "batch": 8, "seed": seed}
        found.append(fit_pseudolikelihood(model, data(), solver="adam", **options).losses)
    assert found[0] == found[1] != found[2]
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"l2": -1.0}, ValueError, "l2"),
        ({"solver": "newton"}, ValueError, "solver"),
        ({"solver": "adam", "rate": 0.0}, ValueError, "rate"),
        ({"solver": "adam", "rate": 1e38}, ValueError, "rate"),
        ({"solver": "adam", "schedule": "none"}, ValueError, "schedule"),
        ({"rate": 0.1}, ValueError, "rate needs solver='adam'"),
        ({"solver": "adam", "tolerance": 1e-3}, ValueError, "tolerance needs solver='lbfgs'"),
        ({"watch": 3}, TypeError, "watch"),
    ],
)
def test_mistakes(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fit_pseudolikelihood(PottsModel(4, 3), data(), **options)
    with pytest.raises(TypeError, match="model"):
        fit_pseudolikelihood(torch.nn.Linear(2, 2), data())  # type: ignore[arg-type]

"""Options of a solve: a stopping rule, auxiliary outputs, bounds; and roots of F(z) = 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import solvers
from cases.solves import normal
from implicit_attn import DEQ
from solvers import Descent, Status, fixed_point, root


def step(z: Tensor, x: Tensor) -> Tensor:
    return 0.5 * torch.tanh(z) + x


# --- stop ---


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("solver", ["forward", "anderson", "broyden", None])
def test_a_rule_stops_samples_with_the_iterate_that_it_saw(solver: Any, compact: bool) -> None:
    x = normal(9, 3) * torch.logspace(-2, 1, 9)[:, None]
    asked: list[Tensor] = []

    def large(z: Tensor) -> Tensor:
        asked.append(z)
        return z.norm(dim=1) > 1

    found = fixed_point(step, torch.zeros_like(x), (x,), solver=solver, stop=large, compact=compact)
    stopped = found.status == Status.STOPPED
    assert stopped.any() and found.converged.any() and (stopped | found.converged).all()
    assert torch.equal(stopped, found.value.norm(dim=1) > 1)
    assert all(len(z) == 9 for z in asked) and len(asked) == found.evaluations.max()
    seen = torch.stack(asked)
    first = (seen.norm(dim=2) > 1).double().argmax(0)
    assert torch.equal(found.value[stopped], seen[first, torch.arange(9)][stopped])
    assert torch.equal(found.evaluations[stopped], first[stopped] + 1)
    residual = (step(found.value, x) - found.value).norm(dim=1)
    torch.testing.assert_close(found.residual_norm, residual, rtol=1e-6, atol=1e-9)


def test_a_rule_that_never_holds_changes_nothing_and_a_stopped_sample_warns_nobody() -> None:
    x = normal(4, 3)
    options: dict[str, Any] = {"solver": "forward", "on_failure": "raise"}
    never = fixed_point(
        step, x, (x,), stop=lambda z: torch.zeros(4, dtype=torch.bool), record=True, **options
    )
    plain = fixed_point(step, x, (x,), record=True, **options)
    assert torch.equal(never.value, plain.value) and never.converged.all()
    at_once = fixed_point(step, x, (x,), stop=lambda z: z[:, 0] == z[:, 0], **options)
    assert at_once.statuses == ["STOPPED"] * 4 and not at_once.converged.any()
    assert torch.equal(at_once.value, x)


def test_a_stopped_sample_has_the_gradient_of_the_chosen_adjoint() -> None:
    x = normal(3, 2).requires_grad_()
    options: dict[str, Any] = {"stop": lambda z: z.norm(dim=1) > 0, "solver": "forward"}
    found = fixed_point(step, torch.zeros(3, 2).double(), (x,), adjoint="unrolled", **options)
    assert found.statuses == ["STOPPED"] * 3  # after one step, z = x
    (gradient,) = torch.autograd.grad(found.value.sum(), x)
    torch.testing.assert_close(gradient, torch.ones_like(x))
    found = fixed_point(step, torch.zeros(3, 2).double(), (x,), **options)
    (gradient,) = torch.autograd.grad(found.value.sum(), x)
    slope = 0.5 / torch.cosh(found.value.detach()) ** 2
    torch.testing.assert_close(gradient, 1 / (1 - slope), rtol=1e-3, atol=1e-3)


def test_a_layer_stops_by_its_rule() -> None:
    x = normal(3, 2, 4)
    layer = DEQ.from_update(step, stop=lambda z: z.flatten(1).norm(dim=1) > 0)
    assert layer.solve(x).statuses == ["STOPPED"] * 3
    assert layer.solve(x, stop=None).statuses == ["CONVERGED"] * 3
    with pytest.raises(RuntimeError, match=r"torch.func"):
        torch.func.grad(lambda x: layer(x).sum())(x)


# --- has_aux ---


class Counted(nn.Module):
    """A map that also returns what it computes on the way, each sample's and one number of all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4).double()

    def forward(self, z: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        inner = self.linear(z)
        return 0.5 * torch.tanh(inner) + x, {"inner": inner, "mean": inner.mean()}


@pytest.mark.parametrize("gradients", [True, False])
def test_auxiliary_output_is_that_of_the_returned_value(gradients: bool) -> None:
    cell, x = Counted(), normal(5, 4) * torch.logspace(-2, 1, 5)[:, None]
    with torch.set_grad_enabled(gradients):
        found = fixed_point(cell, torch.zeros_like(x), (x,), has_aux=True, tolerance=1e-10)
    expected = cell(found.value.detach(), x)[1]
    torch.testing.assert_close(found.aux["inner"].detach(), expected["inner"].detach())
    assert found.aux["mean"].requires_grad == gradients
    assert fixed_point(step, x, (x,)).aux is None


def test_gradients_pass_through_the_auxiliary_output() -> None:
    cell, x = Counted(), normal(3, 4).requires_grad_()
    layer = DEQ.from_update(cell, has_aux=True, tolerance=1e-12, max_steps=100)
    inputs = [x, *layer.parameters()]
    found = torch.autograd.grad(layer.solve(x).aux["inner"].pow(3).sum(), inputs)
    z = x
    for _ in range(100):
        z = cell(z, x)[0]
    exact = torch.autograd.grad(cell(z, x)[1]["inner"].pow(3).sum(), inputs)
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-8)
    assert not layer.last.aux["inner"].requires_grad  # type: ignore[union-attr]
    assert layer.jacobian_penalty(x.detach(), x.detach()).shape == (3,)
    torch.testing.assert_close(layer.unrolled(100)(x), z)


# --- bounds ---

MATRIX = normal(4, 4, seed=1) @ normal(4, 4, seed=1).T + torch.eye(4, dtype=torch.float64)


def quadratic(z: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (z @ MATRIX * z).sum(1) - (target * z).sum(1)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(
    "solver",
    [None, "forward", "gradientdescent", solvers.GradientDescent(0.5, momentum=0.5, nesterov=True)],
)
def test_projected_descent_finds_the_minimum_in_a_box(solver: Any, compact: bool) -> None:
    """And a coordinate that is held at a bound has no gradient: the others have that of the free system."""
    target = (3 * normal(6, 4, seed=2)).requires_grad_()
    found = fixed_point(
        Descent(quadratic, 0.08), torch.full((6, 4), 9.0).double(), (target,), bounds=(-0.5, 0.8),
        solver=solver, tolerance=1e-10, max_steps=3000, compact=compact,
    )  # fmt: skip
    assert found.converged.all()
    weights, value = normal(6, 4, seed=3), found.value.detach()
    (gradient,) = torch.autograd.grad((weights * found.value).sum(), target)
    slope = value @ MATRIX - target.detach()
    low, high = value < -0.5 + 1e-9, value > 0.8 - 1e-9
    free = ~(low | high)
    assert 4 < int((~free).sum()) < 20
    assert (slope[free].abs() <= 1e-6).all() and (slope[low] > 0).all() and (slope[high] < 0).all()
    for row in range(6):
        expected, inside = torch.zeros(4, dtype=torch.float64), free[row]
        expected[inside] = torch.linalg.solve(MATRIX[inside][:, inside], weights[row][inside])
        torch.testing.assert_close(gradient[row], expected, rtol=1e-6, atol=1e-6)


def test_bounds_of_each_coordinate_and_of_one_side() -> None:
    x = normal(3, 2, 4)
    low = torch.linspace(-1, 1, 4).double()
    layer = DEQ.from_energy(lambda z, x: (z - x).square().sum((1, 2)), bounds=(low, None))
    torch.testing.assert_close(layer(x), torch.maximum(x, low))
    plain = fixed_point(step, x, (x,), bounds=(None, 0.1))
    torch.testing.assert_close(plain.value, step(plain.value, x).clamp(max=0.1), rtol=0, atol=1e-3)
    mask = torch.tensor([[True, False]]).expand(3, 2)
    held = fixed_point(step, x - 9, (x,), bounds=(0.0, 1.0), mask=mask)
    assert torch.equal(held.value[:, 1], x[:, 1] - 9) and (held.value[:, 0] >= 0).all()
    with pytest.raises(ValueError, match="bounds"):
        layer.unrolled(3)


# --- root ---


def kepler(z: Tensor, mean: Tensor, eccentricity: Tensor) -> Tensor:
    return z - eccentricity * torch.sin(z) - mean


@pytest.mark.parametrize("solver", ["newton", "anderson", "broyden"])
def test_roots_have_implicit_gradients(solver: str) -> None:
    mean = torch.linspace(0.1, 3, 8).double()[:, None].requires_grad_()
    eccentricity = torch.linspace(0.0, 0.9, 8).double()[:, None].requires_grad_()
    found = root(kepler, mean.detach(), (mean, eccentricity), solver=solver, tolerance=1e-12)
    z = found.value.detach()
    assert found.converged.all()
    assert kepler(z, mean, eccentricity).abs().max() < 1e-10
    by_mean, by_eccentricity = torch.autograd.grad(found.value.sum(), [mean, eccentricity])
    slope = 1 - eccentricity * torch.cos(z)
    torch.testing.assert_close(by_mean, 1 / slope, rtol=1e-8, atol=0)
    torch.testing.assert_close(by_eccentricity, torch.sin(z) / slope, rtol=1e-8, atol=0)


def test_an_equation_without_a_root_is_named() -> None:
    with pytest.warns(solvers.SolveWarning, match="root"):
        found = root(lambda z: z**2 + 1, torch.ones(2, 1))
    assert not found.converged.any()
    with pytest.raises(ValueError, match="F"):
        root(lambda z: z.sum(1, keepdim=True), torch.ones(2, 3))
    with pytest.raises(TypeError, match="energy"):
        root(lambda z: z, torch.ones(2, 3), energy=lambda z: z.sum(1))


def test_an_empty_batch_has_the_states_that_were_asked_for() -> None:
    found = fixed_point(lambda z: 0.1 * z + 1, torch.zeros(0, 4), states_at=(1, 3))
    assert [state.shape for state in found.states] == [(0, 4), (0, 4)]

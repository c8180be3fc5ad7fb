"""Options of a solve: a stopping rule; maps that clamp; and roots of F(z) = 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from cases.solves import normal
from implicit_attn import DEQ
from solvers import Status, fixed_point, root


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


# --- a box, by clamping in f ---

MATRIX = normal(4, 4, seed=1) @ normal(4, 4, seed=1).T + torch.eye(4, dtype=torch.float64)


def test_a_map_that_clamps_finds_the_minimum_in_a_box() -> None:
    """And a coordinate that is held at a bound has no gradient: the others have that of the free system."""
    target = (3 * normal(6, 4, seed=2)).requires_grad_()
    found = fixed_point(
        lambda z, target: (z - 0.08 * (z @ MATRIX - target)).clamp(-0.5, 0.8),
        torch.full((6, 4), 9.0).double(), (target,), solver="forward", tolerance=1e-10, max_steps=3000,
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


def test_a_measure_is_compared_in_the_place_of_the_state() -> None:
    """Half of the state only accumulates the other half, and the direction of the rest converges."""

    def f(z: Tensor, x: Tensor) -> Tensor:
        a, b = z[:, :3], z[:, 3:]
        return torch.cat([0.5 * torch.tanh(a) + x, b + 1.0], 1)

    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = torch.zeros(5, 6, dtype=torch.float64)
    plain = fixed_point(f, start, (x,), on_failure="ignore", adjoint=None)
    assert not plain.converged.any()
    found = fixed_point(f, start, (x,), measure=lambda z: z[:, :3], tolerance=1e-8, adjoint=None)
    assert found.converged.all()
    first = found.value[:, :3]
    torch.testing.assert_close(0.5 * torch.tanh(first) + x, first, rtol=1e-7, atol=0)
    layer = DEQ.from_update(f, measure=lambda z: z[:, :3], init=lambda x: start)
    layer(x)
    assert layer.last is not None and layer.last.converged.all()
    with pytest.raises(ValueError, match="measure must return tensors of batch size 5"):
        fixed_point(f, start, (x,), measure=lambda z: z.sum(0))

"""The forms as optimisers: each is the method that it is called, and the known rates are met."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from implicit_attn.studies.experiments.optimisers.fixed_energy import (
    METHODS,
    Elastic,
    Method,
    compare_methods,
    curvatures_at_minima,
    descend,
    first_below,
    tuned_constants,
)

BY_NAME = {method.name: method for method in METHODS}


def problem(seed: int = 0, starts: int = 3) -> tuple[Elastic, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, 1, 9, 4, generator=generator, dtype=torch.float64)
    return Elastic(keys, 1.6), torch.randn(
        1, 1, starts, 4, generator=generator, dtype=torch.float64
    )


def value(query: Tensor, energy: Elastic) -> Tensor:
    """``-T log sum_j exp(-|q - k_j|^2 / (2T))`` of one query (p,), as it is written."""
    squares = (query - energy.keys[0, 0]).square().sum(-1)
    return -energy.temperature * (-squares / (2 * energy.temperature)).exp().sum().log()


@pytest.mark.parametrize("seed", range(3))
def test_directions_are_those_of_autograd(seed: int) -> None:
    energy, query = problem(seed)
    for place, q in enumerate(query[0, 0]):
        gradient = torch.func.grad(value)(q, energy)
        hessian = torch.func.jacrev(torch.func.grad(value))(q, energy)
        covariance = torch.eye(4, dtype=q.dtype) - hessian
        expected = {0: gradient, 1: gradient + covariance @ gradient}
        expected[2] = gradient + covariance @ expected[1]
        for order, direction in expected.items():
            found = energy.direction(query, order)[0, 0, place]
            torch.testing.assert_close(found, direction, rtol=1e-11, atol=1e-12)
        newton = energy.direction(query, None)[0, 0, place]
        torch.testing.assert_close(hessian @ newton, gradient, rtol=1e-11, atol=1e-12)
        curvatures = energy.curvatures(query)[0, 0, place]
        torch.testing.assert_close(curvatures, torch.linalg.eigvalsh(hessian))


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_recursion_is_that_of_sgd(nesterov: bool) -> None:
    """Whose parameters are, with Nesterov's momentum, the points where it evaluates."""
    energy, query = problem(starts=1)
    parameter = query[0, 0, 0].clone().requires_grad_()
    optimiser = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, nesterov=nesterov)
    for _ in range(8):
        optimiser.zero_grad()
        value(parameter, energy).backward()
        optimiser.step()
    method = Method("", momentum=0.5, nesterov=nesterov)
    norms, end = descend(energy, query, method, steps=8)
    if not nesterov:
        torch.testing.assert_close(end[0, 0, 0], parameter.detach(), rtol=1e-12, atol=1e-12)
    else:
        before = descend(energy, query, method, steps=7)[1]
        ahead = end + 0.5 * (end - before)
        torch.testing.assert_close(ahead[0, 0, 0], parameter.detach(), rtol=1e-12, atol=1e-12)
    gradient = torch.func.grad(value)(end[0, 0, 0], energy)
    torch.testing.assert_close(norms[-1, 0, 0], gradient.norm())


@pytest.mark.parametrize("kind", ["plain", "momentum", "nesterov"])
def test_tuned_constants_have_the_rate_of_the_quadratic(kind: str) -> None:
    """The largest modulus of the roots of the recursion over curvatures in between."""
    low, high = torch.tensor(0.3, dtype=torch.float64), torch.tensor(1.2, dtype=torch.float64)
    eta, beta = (float(each) for each in tuned_constants(kind, low, high))
    radii = []
    for curvature in torch.linspace(0.3, 1.2, 31, dtype=torch.float64).tolist():
        shrink = 1 - eta * curvature
        trace = beta + shrink if kind == "momentum" else (1 + beta) * shrink
        last = -beta if kind == "momentum" else -beta * shrink
        roots = torch.linalg.eigvals(torch.tensor([[trace, last], [1, 0]], dtype=torch.float64))
        radii.append(roots.abs().max().item())
    rate = {"plain": 3 / 5, "momentum": 1 / 3, "nesterov": 1 - 1 / 2}[kind]
    assert max(radii) == pytest.approx(rate, abs=1e-6)


def test_steps_to_the_bound_come_in_the_order_of_the_rates() -> None:
    """Newton's orders from the best on; the root of 0.9 is the rate of heavy ball for any step."""
    table, curves = compare_methods(draws=1, starts=3, steps=470)
    steps = {row["method"]: row["steps"] for row in table}
    orders = [
        steps[name] for name in ("Newton", *(f"Newton, order {m}" for m in (4, 2, 1)), "plain")
    ]
    assert orders == sorted(orders) and steps["Newton"] <= 6
    assert steps["plain"] <= 40 and 45 <= steps["Nesterov 0.9"] <= 65
    assert steps["momentum 0.5"] == pytest.approx(10 / -math.log10(0.5**0.5), abs=4)
    assert steps["momentum 0.9"] == pytest.approx(10 / -math.log10(0.9**0.5), abs=25)
    assert steps["momentum, tuned"] < steps["plain, tuned"] < steps["plain"]
    assert all(row["reached"] == row["minima"] == 1 for row in table)
    assert {row["method"] for row in curves} == set(steps)


def test_the_curvatures_are_those_at_the_end() -> None:
    energy, query = problem()
    low, high = curvatures_at_minima(energy, query)
    end = descend(energy, query, BY_NAME["Newton, order 1"], steps=60)[1]
    found = energy.curvatures(end)
    torch.testing.assert_close(low.squeeze(), found.min(), rtol=1e-8, atol=0)
    torch.testing.assert_close(high.squeeze(), found.max(), rtol=1e-8, atol=0)


def test_a_norm_that_rises_again_has_not_reached_the_bound() -> None:
    norms = torch.tensor([[3.0, 3.0, 0.1], [0.1, 3.0, 0.1], [2.0, 0.5, 0.1], [0.1, 4.0, 0.1]])
    assert first_below(norms[:, None], 1.0).tolist() == [[3.0, math.inf, 0.0]]
    norms[3, 0] = math.nan
    assert first_below(norms[:, None], 1.0)[0, 0] == math.inf


def test_what_does_not_fit_is_refused() -> None:
    energy, query = problem()
    with pytest.raises(ValueError, match="curvatures must be given"):
        descend(energy, query, BY_NAME["plain, tuned"], steps=1)
    with pytest.raises(ValueError, match="draws"):
        compare_methods(draws=0)
    with pytest.raises(ValueError, match="temperature"):
        compare_methods(temperature=0.0)

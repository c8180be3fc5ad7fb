"""Momentum over sublayers, against torch's optimisers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.energies import relative_error
from implicit_attn.energies import SoftmaxAttention
from implicit_attn.updates import DescentStep

STEPS = 8


def problem() -> tuple[SoftmaxAttention, Tensor, Tensor]:
    torch.manual_seed(0)
    energy = SoftmaxAttention(6, 2, energy="elastic", cross=True, norm=None).double()
    generator = torch.Generator().manual_seed(1)
    z, x = torch.randn(2, 2, 4, 6, generator=generator, dtype=torch.float64)
    return energy, z, x


def step_of(branch: Any, method: str, lookahead: str = "literal", **numbers: float) -> DescentStep:
    """With these beta and eta."""
    made = DescentStep(branch, method, lookahead=lookahead).double().requires_grad_(False)
    for name, number in numbers.items():
        made.numbers[name].fill_(number)
    return made


def run(steps: list[DescentStep], z: Tensor, *args: Any) -> tuple[list[Tensor], Tensor | None]:
    states, p = [z], None
    for step in steps:
        z, p = step(z, p, *args)
        states.append(z)
    return states, p


def descent(energy: SoftmaxAttention, x: Tensor, **options: Any) -> list[DescentStep]:
    def branch(z: Tensor) -> Tensor:
        return -energy.grad(z, x)

    return [step_of(branch, **options) for _ in range(STEPS)]


def by_torch(energy: SoftmaxAttention, z: Tensor, x: Tensor, **options: Any) -> list[Tensor]:
    """Parameters of ``torch.optim.SGD`` before each of its steps, and after the last."""
    parameter = nn.Parameter(z.clone())
    optimizer = torch.optim.SGD([parameter], **options)
    states = [z]
    for _ in range(STEPS):
        parameter.grad = energy.grad(parameter.detach(), x)
        optimizer.step()
        states.append(parameter.detach().clone())
    return states


@pytest.mark.parametrize("eta", [0.25, 0.3, 1.0])
def test_heavy_ball_is_that_of_torch(eta: float) -> None:
    energy, z, x = problem()
    with torch.no_grad():
        found, _ = run(descent(energy, x, method="momentum", beta=0.6, eta=eta), z)
        expected = by_torch(energy, z, x, lr=eta, momentum=0.6)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) <= 1e-12


@pytest.mark.parametrize(
    ("lookahead", "eta", "equal"),
    [("scaled", 0.3, True), ("literal", 1.0, True), ("literal", 0.3, False)],
)
def test_where_nesterov_evaluates(lookahead: str, eta: float, equal: bool) -> None:
    """The points at are the parameters of ``SGD(nesterov=True)``; the literal ones at eta 1 only."""
    energy, z, x = problem()
    seen: list[Tensor] = []

    def branch(at: Tensor) -> Tensor:
        seen.append(at)
        return -energy.grad(at, x)

    options: dict[str, Any] = {"beta": 0.6, "eta": eta, "lookahead": lookahead}
    run([step_of(branch, "nesterov", **options) for _ in range(STEPS)], z)
    expected = by_torch(energy, z, x, lr=eta, momentum=0.6, nesterov=True)
    errors = [relative_error(at, theirs) for at, theirs in zip(seen, expected, strict=False)]
    assert max(errors) <= 1e-12 if equal else max(errors) > 0.1


def sublayers(method: str, **options: Any) -> list[DescentStep]:
    torch.manual_seed(3)
    branches = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)]
    return [step_of(branch, method, **options) for branch in branches]


@pytest.mark.parametrize("method", ["gain", "momentum", "nesterov"])
def test_without_momentum_it_is_the_plain_step_bit_by_bit(method: str) -> None:
    _, z, _ = problem()
    plain, p = run(sublayers("plain"), z)
    options = {} if method == "gain" else {"beta": 0.0}
    found, _ = run(sublayers(method, **options), z)
    assert p is None
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_the_lookahead_of_queries_alone() -> None:
    _, z, _ = problem()
    seen: list[tuple[Tensor, Tensor]] = []

    def branch(at: Tensor, *, memory: Tensor) -> Tensor:
        seen.append((at, memory))
        return at - memory + 1.0

    options: dict[str, Any] = {"beta": 0.5, "lookahead": "queries"}
    steps = [step_of(branch, "nesterov", **options) for _ in range(2)]
    z, p = steps[0](z)
    steps[1](z, p)
    assert torch.equal(seen[0][0], seen[0][1]) and torch.equal(seen[1][1], z)
    assert torch.equal(seen[1][0], z - 0.5 * p)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match='needs method="nesterov"'):
        DescentStep(torch.tanh, "momentum", lookahead="scaled")

"""States after chosen numbers of evaluations: what they are, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from solvers import Anderson, Broyden, Descent, Forward, Implicit, Phantom, Unrolled, fixed_point

WEIGHT = 0.3 * torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def step(z: Tensor, x: Tensor) -> Tensor:
    """Samples with larger x take fewer evaluations."""
    return torch.tanh(z @ WEIGHT) + x


def energy(z: Tensor, x: Tensor) -> Tensor:
    return (0.5 * z.square() - (z + x).tanh() @ WEIGHT.square() * 0.3 - 0.1 * x * z).sum(1)


def sample(batch: int = 5) -> Tensor:
    drawn = torch.randn(batch, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return drawn * torch.logspace(1, -2, batch, dtype=torch.float64)[:, None]


def solve(f: Any = step, x: Tensor | None = None, **options: Any) -> solvers.Solution:
    x = sample() if x is None else x
    given: dict[str, Any] = {"tolerance": 1e-8, "max_steps": 30, "adjoint": None}
    given |= {"on_failure": "ignore"} | options
    return fixed_point(f, torch.zeros_like(x), (x,), **given)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(("f", "solver"), [
    (step, None),
    (step, Forward(0.7)),
    (step, Broyden()),
    (Descent(energy), None),
    (Descent(energy), solvers.LBFGS()),
    (Descent(energy), Anderson(memory=3)),
], ids=["map", "map-Forward", "map-Broyden", "energy", "energy-LBFGS", "energy-Anderson"])  # fmt: skip
def test_a_state_is_what_the_smaller_budget_returns(f: Any, solver: Any, compact: bool) -> None:
    x = torch.cat([sample(20), 0 * sample(2)])
    at = [1, 5, 6, 30]
    whole = solve(f, x, solver=solver, compact=compact, states_at=at)
    assert len(whole.states) == len(at)
    for number, state in zip(at, whole.states, strict=True):
        # Recorded, so that the loop solves it, too: the engine rounds differently.
        part = solve(f, x, solver=solver, compact=compact, max_steps=number, record=True)
        assert torch.equal(state, part.value)
    assert int(whole.evaluations.min()) < 6 < int(whole.evaluations.max())


def test_second_attempts_count_on() -> None:
    """The default solver gives these samples up, and plain steps go on from where it was."""

    def kinked(z: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
        return (z - torch.einsum("bij,bj->bi", matrix, z) + target).clamp(-0.3, 0.3)

    drawn = torch.randn(64, 8, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    basis = torch.linalg.qr(drawn[..., :8]).Q
    args = ((basis * torch.logspace(0, -3, 8)) @ basis.mT, drawn[..., 8])
    z0 = torch.zeros_like(drawn[..., 8])
    options: dict[str, Any] = {"adjoint": None, "tolerance": 1e-5}
    options |= {"on_failure": "ignore"}
    at = [20, 103, 400]
    whole = fixed_point(kinked, z0, args, max_steps=400, states_at=at, **options)
    first = fixed_point(kinked, z0, args, max_steps=400, solver=Anderson(), **options)
    assert not bool(first.converged.all()) and bool(whole.converged.all())
    assert (whole.evaluations > first.evaluations).any()
    moved = [(z - whole.value).norm(dim=1) for z in whole.states]
    assert moved[0].any() and moved[1].any() and not moved[2].any()


def tree_step(z: Any, x: Any) -> Any:
    return {"a": step(z["a"], x), "b": (0.3 * z["a"] + 0.2 * z["b"]).sin()}


def test_structure_and_memory() -> None:
    x = sample(3)
    z0 = {"a": torch.zeros_like(x), "b": torch.ones_like(x)}
    found = fixed_point(tree_step, z0, (x,), states_at=[1, 3, 4], adjoint=None)
    assert torch.equal(found.states[0]["b"], z0["b"])
    found.states[0]["b"].zero_()
    found.states[2]["a"].zero_()
    assert float(z0["b"].min()) == 1 and float(found.value["a"].abs().max()) > 0


@pytest.mark.parametrize("checkpoint", [False, True])
def test_unrolled_states_have_exact_gradients(checkpoint: bool) -> None:
    def states(x: Tensor) -> tuple[Tensor, ...]:
        adjoint, solver = Unrolled(checkpoint), Anderson(memory=2)
        found = solve(x=x, adjoint=adjoint, solver=solver, states_at=[1, 2, 5], max_steps=6)
        return (*found.states, found.value)

    x = (0.5 * torch.ones(1, 6, dtype=torch.float64) + 0.1 * sample(1)).requires_grad_()
    assert torch.autograd.gradcheck(states, (x,), atol=1e-6)


@pytest.mark.parametrize(("adjoint", "number", "damping"), [
    (Phantom(3, 0.7), 3, 0.7),
    (solvers.OneStep(), 1, 1.0),
    (Implicit(), 1, 1.0),
    (Implicit(states=Phantom(2)), 2, 1.0),
], ids=str)  # fmt: skip
def test_the_others_iterate_from_the_state(adjoint: Any, number: int, damping: float) -> None:
    x = sample().requires_grad_()
    found = solve(x=x, adjoint=adjoint, states_at=[2, 6])
    plain = solve(x=x.detach(), states_at=[2, 6])
    for state, expected in zip(found.states, plain.states, strict=True):
        assert torch.equal(state, expected)
        z = expected
        for _ in range(number):
            z = (1 - damping) * z + damping * step(z, x)
        wanted = torch.autograd.grad(z.pow(3).sum(), x, grad_outputs=None, retain_graph=True)[0]
        cotangent = 3 * z.detach().square()  # of the iterations' end, to be asked of the state
        (gradient,) = torch.autograd.grad(state, x, cotangent, retain_graph=True)
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("states_at", "error", "match"), [
    ([0], ValueError, r"states_at\[0\] must be >= 1"),
    ([2, 2], ValueError, r"states_at must increase, got \[2, 2\]"),
    ([2, 31], ValueError, "states_at must be at most max_steps=30"),
    ([2.0], TypeError, r"states_at\[0\] must be an integer"),
    (5, TypeError, "states_at must be a sequence of integers, got 5"),
    ("5", TypeError, "states_at must be a sequence"),
])  # fmt: skip
def test_wrong_numbers(states_at: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        solve(states_at=states_at)


def test_what_cannot_have_states_says_so() -> None:
    with pytest.raises(TypeError, match=r"states must be solvers.Phantom.* got Unrolled"):
        Implicit(states=Unrolled())  # type: ignore[arg-type]

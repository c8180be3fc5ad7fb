"""The fixed-point correction against torchdeq's, and its derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchdeq.loss import fp_correction

import solvers
from implicit_attn import DEQ
from implicit_attn.regularization import correction_weights, fixed_point_correction, states_at


def states(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"gamma": 0.5}, {"weight_func": "exp", "gamma": 0.5}),
        ({"kind": "linear"}, {"weight_func": "linear"}),
        ({"kind": "linear", "gamma": 0.3}, {"weight_func": "linear", "gamma": 0.3}),
    ],
)
def test_same_as_torchdeq(count: int, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    passed = states(count)
    expected = fp_correction(lambda z: z.square().mean(), (passed,), **theirs)
    found = fixed_point_correction(
        lambda z: z.square().mean(), passed, correction_weights(count, **ours)
    )
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def test_weights_by_hand() -> None:
    assert correction_weights(3, "constant") == [1, 1, 1]
    assert correction_weights(3, gamma=0.5) == [0.25, 0.5, 1]
    assert correction_weights(4, "linear", gamma=1.0) == [0.25, 0.5, 0.75, 1]
    a, b = states(2)
    found = fixed_point_correction(lambda z: z.sum(1), [a, b], weights=[2, 3])
    torch.testing.assert_close(found, 2 * a.sum(1) + 3 * b.sum(1))


def shifted(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(0.6 * z.roll(1, -1)) + x


def test_gradient_through_an_unrolled_solve() -> None:
    """Central differences of the whole: solve, states, weighted sum."""
    layer = DEQ.from_update(
        shifted,
        solver=solvers.Anderson(memory=3),
        adjoint=solvers.Unrolled(),
        tolerance=solvers.Tolerance(0.0),
        max_steps=5,
        on_failure="ignore",
    )

    def total(x: Tensor) -> Tensor:
        z0 = 0.3 * torch.ones_like(x)
        every = [*states_at(layer, x, [1, 2, 4], z0=z0), layer.solve(x, z0=z0).value]
        return fixed_point_correction(lambda z: z.pow(2).sum(), every)

    x = states(1)[0][:, None].requires_grad_()
    assert torch.autograd.gradcheck(total, (x,))


def test_states_on_the_way_are_those_of_shorter_solves() -> None:
    layer = DEQ.from_update(shifted, solver=solvers.Forward())
    x = states(1)[0][:, None].requires_grad_()
    layer(x)
    last = layer.last
    first, second = states_at(layer, x, [1, 3])
    assert (
        torch.equal(first, x) and layer.last is last
    )  # the initial state, of which one step is known
    torch.testing.assert_close(second, shifted(shifted(x, x), x))
    (found,) = torch.autograd.grad(second.sum(), x)
    (expected,) = torch.autograd.grad(shifted(second.detach(), x).sum(), x)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="numbers"):
        states_at(layer, x, [3, 1])
    with pytest.raises(TypeError, match="layer must be a DEQ"):
        states_at(shifted, x, [1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"states": []}, TypeError, "states must be a sequence of at least one"),
        ({"states": torch.ones(2, 3)}, TypeError, "states must be a sequence"),
        ({"weights": [1.0]}, ValueError, "weights must be 2 numbers like states, got 1"),
        ({"loss": lambda z: 1.0}, TypeError, "loss must return a tensor"),
        (
            {"loss": lambda z: z[: int(z[0, 0] > 0)]},
            TypeError,
            "loss must return a tensor of one shape",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    given: dict[str, Any] = {"loss": torch.mean, "states": [torch.ones(2, 3), -torch.ones(2, 3)]}
    given |= arguments
    with pytest.raises(error, match=match):
        fixed_point_correction(given.pop("loss"), given.pop("states"), **given)

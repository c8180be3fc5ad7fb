"""States between segments of iterations: those of a loop written by hand, and of torchdeq."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchdeq import get_deq

from cases.deq import LAYERS, make, tokens
from implicit_attn import DEQ, GradientStep
from implicit_attn.energies import FunctionEnergy

DTYPE = torch.float64
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}


class Pair(nn.Module):
    """A map of two coupled states of different shapes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 3, dtype=DTYPE)
        self.second = nn.Linear(3, 4, dtype=DTYPE)

    def forward(self, z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.first(z[1])) + x, torch.tanh(self.second(z[0]))


def zeros(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(x), x.new_zeros(len(x), 4)


def drawn() -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(1), dtype=DTYPE)


def by_hand(cell: nn.Module, x: Tensor, steps: Sequence[int], grad: int) -> list[Any]:
    z, states = zeros(x), []
    for number in steps:
        with torch.no_grad():
            for _ in range(number - grad):
                z = cell(z, x)
        for _ in range(grad):
            z = cell(z, x)
        states.append(z)
        z = (z[0].detach(), z[1].detach())
    return states


def loss_of(states: Sequence[Any]) -> Tensor:
    terms = [(k + 1) * (z[0].square().sum() + z[1].sum()) for k, z in enumerate(states)]
    return torch.stack(terms).sum()


def compare(found: Sequence[Any], expected: Sequence[Any], weights: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(tuple(mine), tuple(other), **CLOSE)
    slopes = [
        torch.autograd.grad(loss_of(states), weights, retain_graph=True)
        for states in (found, expected)
    ]
    torch.testing.assert_close(*slopes, **CLOSE)


@pytest.mark.parametrize(("steps", "grad"), [(1, 1), (4, 1), (3, 3), ([2, 5, 3], 2)])
def test_as_a_loop_by_hand(steps: Any, grad: int) -> None:
    cell, x = Pair(), drawn().requires_grad_()
    layer = DEQ.from_update(cell, init=zeros)
    found = list(layer.supervised(x, 3, steps, grad=grad))
    lengths = [steps] * 3 if isinstance(steps, int) else steps
    compare(found, by_hand(cell, x, lengths, grad), [*cell.parameters(), x])


def test_without_detaching_it_is_one_long_unrolled_layer() -> None:
    cell, x = Pair(), drawn()
    layer = DEQ.from_update(cell, init=zeros)
    found = list(layer.supervised(x, 3, 2, grad=2, detach=False))
    compare(found, [layer.unrolled(k)(x) for k in (2, 4, 6)], list(cell.parameters()))
    # The gradient of the last state reaches the first segment.
    detached = list(layer.supervised(x, 3, 2, grad=2))
    slopes = [torch.autograd.grad(z[-1][0].sum(), cell.second.weight)[0] for z in (found, detached)]
    assert float((slopes[0] - slopes[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("solver", ["simple_fixed_point_iter", "fixed_point_iter"])
@pytest.mark.parametrize("grad", [1, 3])
@pytest.mark.parametrize(
    ("core", "picked"),
    [
        ("sliced", {"n_states": 4}),
        ("sliced", {"indexing": [3, 8]}),
        ("indexing", {"n_states": 4}),
        ("indexing", {"indexing": [3, 8]}),
    ],
)
def test_as_torchdeq(core: str, picked: dict[str, Any], grad: int, solver: str) -> None:
    """The rule of docs/migrating/torchdeq.md: ``sliced`` adds ``grad`` evaluations to each segment.

    ``indexing`` makes them beside the trajectory, so only the first segment is longer.
    """
    cell, x = Pair(), drawn()
    deq = get_deq(core=core, grad=grad, f_solver=solver, f_max_iter=12, f_tol=0.0, **picked)
    theirs, _ = deq.train()(lambda *z: cell(z, x), zeros(x))
    ends = picked.get("indexing", [3, 6, 9])
    steps = [after - before for before, after in pairwise([0, *ends, 12])]
    extra = [grad] * len(steps) if core == "sliced" else [grad] + [0] * (len(steps) - 1)
    steps = [count + more for count, more in zip(steps, extra, strict=True)]
    layer = DEQ.from_update(cell, init=zeros)
    found = list(layer.supervised(x, len(steps), steps, grad=grad))
    compare(found, [tuple(state) for state in theirs], list(cell.parameters()))


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_with_a_mask_and_an_initial_state(name: str) -> None:
    layer, x = make(name), tokens(batch=3)
    mask = None
    if name != "update":
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        mask[1, -1] = False
    start = 0.5 * x
    found = list(layer.supervised(x, 3, 2, grad=2, mask=mask, z0=start))
    for count, state in zip(accumulate([2, 2, 2]), found, strict=True):
        expected = layer.unrolled(count)(x, mask, z0=start)
        torch.testing.assert_close(state, expected, **CLOSE)


def test_weights_may_change_between_segments() -> None:
    """The backward pass and the step of an optimizer come before the next state."""
    cell, x = Pair(), drawn()
    layer, other = DEQ.from_update(cell, init=zeros), Pair()
    ours, theirs = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (cell, other))
    z = zeros(x)
    for found in layer.supervised(x, 4, 3):
        with torch.no_grad():
            z = other(other(z, x), x)
        z = other(z, x)
        torch.testing.assert_close(found, z, **CLOSE)
        for state, optimizer in ((found, ours), (z, theirs)):
            optimizer.zero_grad()
            loss_of([state]).backward()
            optimizer.step()
        z = (z[0].detach(), z[1].detach())


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"segments": 0}, ValueError, "segments"),
        ({"steps": 0}, ValueError, "steps"),
        ({"steps": [2, 3]}, ValueError, "steps"),
        ({"steps": [2, 3, 1.5]}, TypeError, "steps"),
        ({"grad": 3}, ValueError, "grad"),
        ({"grad": 0}, ValueError, "grad"),
        ({"detach": False}, ValueError, "detach"),
        ({"detach": 1}, TypeError, "detach"),
    ],
)
def test_wrong_arguments_raise_at_the_call(
    options: dict[str, Any], error: type[Exception], name: str
) -> None:
    layer = DEQ.from_update(Pair(), init=zeros)
    with pytest.raises(error, match=name):
        layer.supervised(drawn(), **{"segments": 3, "steps": 2, **options})


def test_a_step_size_is_trained_through_steps() -> None:
    """For ``E = 1/2 (z - x)^2``, z_k - x is (1 - eta)^k (z_0 - x)."""
    eta = nn.Parameter(torch.tensor(0.3, dtype=DTYPE))
    quadratic = FunctionEnergy(lambda z, x: 0.5 * (z - x).square().sum(1))
    layer = DEQ(GradientStep(quadratic, eta), init="zeros", tolerance=1e-10, max_steps=500)
    assert [name for name, _ in layer.named_parameters()] == ["update.step_size"]
    x = drawn()
    state = layer.unrolled(3)(x)
    torch.testing.assert_close(state, x - (1 - eta) ** 3 * x, **CLOSE)
    (slope,) = torch.autograd.grad(state.sum(), eta)
    torch.testing.assert_close(slope, (3 * (1 - eta) ** 2 * x.sum()).detach(), **CLOSE)
    assert torch.autograd.gradcheck(lambda x: layer.unrolled(3)(x), (x.clone().requires_grad_(),))
    # The fixed point does not depend on the step size.
    (implicit,) = torch.autograd.grad(layer(x).sum(), eta)
    assert abs(float(implicit)) < 1e-8


@pytest.mark.parametrize("value", [torch.tensor(-0.1), torch.ones(2), torch.tensor(float("nan"))])
def test_wrong_step_sizes(value: Tensor) -> None:
    energy = FunctionEnergy(lambda z: z.square().sum(1))
    with pytest.raises(ValueError, match="step_size"):
        GradientStep(energy, nn.Parameter(value))

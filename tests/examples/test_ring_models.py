"""Models of rings: what a position sees, that no place is special, fixed points and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import solvers

PATH = Path(__file__).resolve().parents[2] / "examples" / "rings" / "ring_models.py"


@pytest.fixture
def rings(load: Callable[[Path], ModuleType]) -> ModuleType:
    torch.manual_seed(0)
    return load(PATH)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def contraction(rings: ModuleType) -> Any:
    model = rings.EquilibriumRing(8, 2).double()
    with torch.no_grad():
        model.layer.update.output.weight.mul_(0.1)
        model.layer.update.narrow.weight.mul_(0.1)
    return model


def test_a_local_block_is_attention_over_the_neighbours(rings: ModuleType) -> None:
    """Against a loop over positions, heads and offsets."""
    model, size = rings.EquilibriumRing(8, 2).double(), 7
    block, table, cells = model.layer.update, model.bias.table, drawn(1, size, 8, seed=2)
    z = drawn(1, size, 8)
    found = block(z, rings.Surroundings(cells, model.bias(size)))
    made = block.queries_keys_values(block.attention_norm(z)).chunk(3, 2)
    query, key, value = (each[0].unflatten(1, (2, 4)) for each in made)
    taken = torch.zeros(size, 2, 4, dtype=torch.float64)
    for i in range(size):
        for h in range(2):
            near = [(i + 1) % size, i, (i - 1) % size]
            scores = torch.stack([query[i, h] @ key[j, h] / math.sqrt(4) for j in near])
            taken[i, h] = (scores + table[h]).softmax(0) @ value[near, h]
    h = cells + block.output(taken.flatten(1))
    wanted = h + block.narrow(block.widen(block.feedforward_norm(h)).relu())
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="takes no mask"):
        model.layer(model.encode(drawn(3, 4, 2)), mask=torch.ones(3, 4, dtype=torch.bool))


def test_a_turned_ring_has_turned_answers(rings: ModuleType) -> None:
    layered = [rings.LayeredRing(8, 2, 3, local) for local in (True, False)]
    for model in (rings.EquilibriumRing(8, 2), *layered):
        for size in (4, 9):
            x = drawn(3, size, 2)
            found = model.double()(x.roll(3, 1))
            torch.testing.assert_close(found, model(x).roll(3, 1), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("depth", [1, 3])
def test_what_is_farther_than_the_evaluations_is_not_seen(depth: int, rings: ModuleType) -> None:
    x = drawn(3, 12, 2)
    other = x.clone()
    other[:, 0] += 1
    distance = torch.minimum(torch.arange(12), 12 - torch.arange(12))

    def changed(model: Any, **options: int) -> list[bool]:
        model = model.double()
        return ((model(x, **options) - model(other, **options)).abs().sum((0, 2)) > 1e-12).tolist()

    # Evaluation t sees the input itself, and its neighbours' states after t - 1; the first starts at zero.
    seen = changed(rings.EquilibriumRing(8, 2), iterations=depth)
    assert seen == (distance < depth).tolist()
    assert changed(rings.LayeredRing(8, 2, depth, True)) == (distance <= depth).tolist()
    assert all(changed(rings.LayeredRing(8, 2, depth)))


def test_iterations_end_at_the_fixed_point_that_the_layer_finds(rings: ModuleType) -> None:
    """Values and gradients, implicit ones and those through 80 iterations."""
    model, x, tight = contraction(rings), drawn(2, 4, 2), solvers.Tolerance(rtol=1e-12)
    implicit = solvers.Implicit(tolerance=tight)
    end = model.layer(model.encode(x), tolerance=tight, max_steps=200, adjoint=implicit)
    wanted = model.decode(end)
    errors = [(model(x, iterations=n) - wanted).abs().max().item() for n in (2, 6, 80)]
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-9
    parameters = list(model.parameters())
    found = torch.autograd.grad(wanted.square().sum(), parameters)
    through = torch.autograd.grad(model(x, iterations=80).square().sum(), parameters)
    for one, other in zip(found, through, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)

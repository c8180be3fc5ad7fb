"""Models of rings: what a position sees, that no place is special, fixed points and their gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from implicit_attn.models.grids.cell_block import CellBlock
from implicit_attn.models.grids.equilibrium_ring import EquilibriumRing, LocalUpdate, Surroundings
from implicit_attn.models.grids.layered_ring import LayeredRing
from implicit_attn.models.grids.ring_bias import DistanceBias, LocalBias, ring_offsets


def inputs(size: int, number: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(number, size, 2, generator=generator, dtype=torch.float64)


def equilibrium(**options: Any) -> EquilibriumRing:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return EquilibriumRing(2, 3, dim=8, heads=2, **options).double().eval()


def shrink(model: EquilibriumRing) -> None:
    """Make the update a contraction."""
    block: Any = model.layer.update.block
    block.output.weight.mul_(0.1)
    block.narrow.weight.mul_(0.1)


def layered(reach: int | None, layers: int = 3) -> LayeredRing:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LayeredRing(2, 3, dim=8, heads=2, layers=layers, reach=reach).double().eval()


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_offsets_go_the_shorter_way(size: int) -> None:
    offsets = ring_offsets(size)
    places = torch.arange(size)
    assert torch.equal((places[:, None] - offsets) % size, places.expand(size, size))
    assert int(offsets.abs().max()) == size // 2


@pytest.mark.parametrize("reach", [1, 2])
def test_a_local_block_is_attention_over_the_neighbours(reach: int) -> None:
    """Against a loop over positions, heads and offsets."""
    model, size = equilibrium(reach=reach), 7
    table = model.bias.table
    block: Any = model.layer.update.block
    z = torch.randn(1, size, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = block.attend(z, model.bias(size))
    query, key, value = (
        each[0].unflatten(1, (2, 4)) for each in block.queries_keys_values(z).chunk(3, 2)
    )
    taken = torch.zeros(size, 2, 4, dtype=torch.float64)
    offsets = range(-reach, reach + 1)
    for i in range(size):
        for h in range(2):
            scores = [
                query[i, h] @ key[(i - n) % size, h] / math.sqrt(4) + table[h, n + reach]
                for n in offsets
            ]
            weights = torch.stack(scores).softmax(0)
            taken[i, h] = sum(
                w * value[(i - n) % size, h] for w, n in zip(weights, offsets, strict=True)
            )  # type: ignore[assignment]
    wanted = block.output(taken.flatten(1))[None]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("model", [equilibrium(), layered(1), layered(None)])
@pytest.mark.parametrize("size", [4, 9])
def test_a_turned_ring_has_turned_answers(model: torch.nn.Module, size: int) -> None:
    x = inputs(size)
    torch.testing.assert_close(model(x.roll(3, 1)), model(x).roll(3, 1), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("depth", [1, 3])
def test_what_is_farther_than_the_evaluations_is_not_seen(depth: int) -> None:
    # Evaluation t sees the input itself, and its neighbours' states after t - 1.
    x, size = inputs(12), 12
    other = x.clone()
    other[:, 0] += 1
    seen = depth - 1  # the first evaluation starts at zero everywhere
    model = equilibrium()
    changed = (model(x, iterations=depth) - model(other, iterations=depth)).abs().sum(
        (0, 2)
    ) > 1e-12
    distance = torch.minimum(torch.arange(size), size - torch.arange(size))
    assert changed.tolist() == (distance <= seen).tolist()
    local = layered(1, layers=depth)
    assert ((local(x) - local(other)).abs().sum((0, 2)) > 1e-12).tolist() == (
        distance <= depth
    ).tolist()
    assert bool(((layered(None)(x) - layered(None)(other)).abs().sum((0, 2)) > 1e-12).all())


def test_more_iterations_are_nearer_to_the_fixed_point_that_the_layer_finds() -> None:
    model, x = equilibrium(), inputs(6)
    with torch.no_grad():
        shrink(model)
        tight = solvers.Tolerance(rtol=1e-12)
        end = model.layer.solve(model.encode(x), tolerance=tight, max_steps=200)
        assert bool(end.converged.all())
        wanted = model.decode(end.value)
        errors = [(model(x, iterations=n) - wanted).abs().max().item() for n in (2, 6, 60)]
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-9


def test_gradients_of_the_update_and_of_the_fixed_point() -> None:
    model, x = equilibrium(), inputs(4, number=2)
    with torch.no_grad():
        shrink(model)
    block: Any = model.layer.update.block
    z = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    given = model.encode(x)

    def update(z: Tensor, cells: Tensor, bias: Tensor) -> Tensor:
        return LocalUpdate(block)(z, Surroundings(cells, bias))

    leaves = [each.detach().clone().requires_grad_() for each in (z, given.cells, given.bias)]
    assert torch.autograd.gradcheck(update, leaves, fast_mode=True)

    tight = solvers.Tolerance(rtol=1e-12)
    parameters = list(model.parameters())
    implicit = model.layer(
        model.encode(x), tolerance=tight, max_steps=200, adjoint=solvers.Implicit(tolerance=tight)
    )
    found = torch.autograd.grad(model.decode(implicit).square().sum(), parameters)
    wanted = torch.autograd.grad(model(x, iterations=80).square().sum(), parameters)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_the_distance_bias_falls_backwards_around_the_ring() -> None:
    bias = DistanceBias(2).double()
    with torch.no_grad():
        bias.table.zero_()
    found = bias(5)
    assert found.shape == (2, 5, 5)
    torch.testing.assert_close(found[0, 1, 1:], torch.tensor([0.0, -2.0, -1.5, -1.0]).double())
    torch.testing.assert_close(found[1], found[0] / 2)


@pytest.mark.parametrize("model", [equilibrium(), layered(1)])
def test_inputs_of_another_shape_are_refused(model: torch.nn.Module) -> None:
    for shape in ((2, 4), (2, 4, 3)):
        with pytest.raises(ValueError, match=r"inputs must be \(B, N, 2\)"):
            model(torch.zeros(shape, dtype=torch.float64))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="heads must divide dim=8, got 3"):
        CellBlock(8, 3, 16)
    with pytest.raises(ValueError, match="reach"):
        LocalBias(2, 0)
    with pytest.raises(ValueError, match="iterations"):
        equilibrium()(inputs(4), iterations=0)
    with pytest.raises(ValueError, match="mask must be None"):
        model = equilibrium()
        model.layer(model.encode(inputs(4)), mask=torch.ones(3, 4, dtype=torch.bool))

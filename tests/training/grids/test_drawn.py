"""Training on drawn batches: it learns, is repeatable, asks for nothing that does not count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.data.tasks.instances import Instances
from implicit_attn.training.finite import NonFiniteLoss
from implicit_attn.training.grids.drawn import train_on_drawn
from implicit_attn.training.recipe import Recipe

RECIPE = Recipe(epochs=40, batch=32, rate=0.1, iterations=(2, 5), seed=3)


class Counting(nn.Module):
    """Linear logits; remembers the iterations it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 2))
        self.asked: list[int | None] = []

    def forward(self, inputs: Tensor, iterations: int | None = None) -> Tensor:
        self.asked.append(iterations)
        return inputs @ self.weight


def signs(number: int, generator: torch.Generator) -> Instances:
    """The sign of each number; every second position has the wrong class and is not counted."""
    inputs = torch.randn(number, 4, 1, generator=generator)
    targets = (inputs[..., 0] > 0).long()
    targets[:, 1::2] = 1 - targets[:, 1::2]
    counted = torch.tensor([True, False]).repeat(number, 2)
    return Instances(inputs, targets, counted, torch.ones(number))


def test_it_learns_from_counted_positions_alone_and_again_the_same() -> None:
    models = [Counting(), Counting()]
    steps: list[int] = []
    state = torch.random.get_rng_state()
    losses = [train_on_drawn(model, signs, RECIPE, advance=steps.append) for model in models]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert losses[0] == losses[1] and len(losses[0]) == 40
    assert losses[0][0] == pytest.approx(math.log(2)) and losses[0][-1] < 0.3
    weight = models[0].weight[0]
    assert weight[1] > weight[0]
    assert set(models[0].asked) == {2, 3, 4, 5}
    assert steps == [*range(40), *range(40)]
    assert not models[0].training


def test_without_iterations_none_are_asked_for() -> None:
    model = Counting()
    train_on_drawn(model, signs, Recipe(epochs=2, batch=4, rate=0.1))
    assert model.asked == [None, None]


def test_a_loss_that_is_not_finite_ends_it() -> None:
    model = Counting()
    with torch.no_grad():
        model.weight.fill_(math.inf)
    with pytest.raises(NonFiniteLoss, match="at step 0"):
        train_on_drawn(model, signs, RECIPE)

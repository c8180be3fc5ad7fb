"""The seven landscapes: no state ends above its start, and each shows what it is said to show."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from implicit_attn.studies.experiments.landscapes.descents import (
    PICTURES,
    Landscape,
    landscapes,
    moved_states,
    spread,
)


def found(seed: int = 2, **options: Any) -> dict[str, Landscape]:
    return {each.picture.name: each for each in landscapes(seed=seed, **options)}


@pytest.mark.parametrize("seed", range(8))
def test_no_state_ends_above_its_start(seed: int) -> None:
    """Nor rises at any step on the way, in any of the seven."""
    pictures = found(seed, points=2)
    assert len(pictures) == len(PICTURES) == 7
    for name, each in pictures.items():
        assert each.rise <= 0, name
        assert (each.energies.diff(dim=0) <= 1e-13).all(), name


def test_the_background_is_the_energy() -> None:
    """By its formula, with x along the columns, over twice the range of the data."""
    for each in found(points=7).values():
        beta = each.picture.scale / math.sqrt(2)
        for row, column in ((0, 3), (5, 1), (6, 6)):
            q = torch.stack([each.grid[0, column], each.grid[1, row]])
            energy = 0.5 * q @ q - (beta * each.keys @ q).logsumexp(0) / beta
            torch.testing.assert_close(each.surface[row, column], energy)
        parts = [each.keys, each.states[0], each.states[-1]]
        shown = torch.cat(parts if each.values is None else [*parts, each.values])
        size = (shown.amax(0) - shown.amin(0)).max()
        torch.testing.assert_close(each.grid[:, -1] - each.grid[:, 0], (2 * size).expand(2))
        torch.testing.assert_close(each.grid[:, 3], (shown.amax(0) + shown.amin(0)) / 2)


def test_one_big_step_is_attention_and_a_small_one_a_tenth_of_it() -> None:
    pictures = found(points=2)
    bare, small = pictures["bare cross-attention"], pictures["small steps"]
    weights = torch.softmax(bare.states[0] @ bare.keys.T / math.sqrt(2), dim=-1)
    torch.testing.assert_close(bare.states[1], weights @ bare.keys)
    difference = small.states[1] - small.states[0]
    torch.testing.assert_close(difference, 0.1 * (bare.states[1] - bare.states[0]))


def test_many_steps_gather_the_states_and_a_small_scale_at_the_mean() -> None:
    pictures = found(points=2)
    many, smooth = pictures["many steps"], pictures["small scale"]
    assert spread(many.states[-1]) < 0.01 < 0.5 < spread(many.states[1])
    assert (smooth.states[-1] - smooth.keys.mean(0)).norm(dim=1).max() < 0.3


def test_a_large_scale_retrieves_single_patterns() -> None:
    each = found(points=2)["large scale"]
    beta = 10 / math.sqrt(2)
    weights = torch.softmax(beta * each.states[-1] @ each.keys.T, dim=-1)
    assert weights.amax(-1).median() > 0.9
    assert weights.argmax(-1).unique().numel() >= 3


def test_values_and_self_attention() -> None:
    pictures = found(points=2)
    each = pictures["queries, keys and values"]
    assert each.values is not None and each.values.shape == each.states[0].shape
    assert not torch.allclose(each.values, each.states[-1])
    own = pictures["bare self-attention"]
    assert torch.equal(own.keys, own.states[0])
    assert (own.states[-1] - own.states[0]).norm(dim=1).mean() > 0.1


def test_tables() -> None:
    pictures = landscapes(states=3, patterns=4, points=2, seed=0)
    table = moved_states(pictures)
    assert len(table) == sum(3 * (picture.steps + 1) for picture in PICTURES)
    last = table[-1]
    place = pictures[-1].states[-1, -1]
    assert (last["state"], last["step"]) == (2, 1)
    assert [last["x"], last["y"]] == place.tolist()


@pytest.mark.parametrize(
    "options", [{"states": 0}, {"patterns": 0}, {"points": 1}], ids=lambda each: next(iter(each))
)
def test_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        landscapes(**options)

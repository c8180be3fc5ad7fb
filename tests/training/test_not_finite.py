"""Losses, gradients and parameters that are not finite: a run stops before they are saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cases.training import Recorder, toy_data
from implicit_attn.checkpoint import load_checkpoint
from implicit_attn.training import NonFiniteLoss, Recipe, Training
from implicit_attn.training.finite import largest_entry

for module in ("safetensors", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="needs the extra [training]")

AT = 3  # the call of the model in which something breaks: the first batch of the second epoch


class Breaks(Recorder):
    """Its outputs are changed in one call, or in none."""

    def __init__(self, change: Callable[[Tensor, nn.Linear], Tensor] | None = None) -> None:
        super().__init__()
        self.change = change

    def forward(self, images: Tensor, iterations: int | None = None) -> Tensor:
        outputs = super().forward(images, iterations)
        if self.change is None or not self.training or len(self.images) != AT:
            return outputs
        return self.change(outputs, self.linear)


def flat_root(outputs: Tensor, linear: nn.Linear) -> Tensor:
    """The outputs themselves; their gradient is 0 times the infinite slope of a root at 0."""
    return outputs + (0 * linear.weight.sum()).sqrt()


def steep_root(outputs: Tensor, linear: nn.Linear) -> Tensor:
    """The outputs themselves; the gradient of one weight is infinite."""
    weight = linear.weight[0, 0]
    return outputs + (weight - weight.detach()).sqrt() * torch.tensor([1.0, 0.0, 0.0])


def training(model: nn.Module, path: Path, clip: float | None = 1.0, **options: Any) -> Training:
    return Training(model, toy_data(), Recipe(2, 5, 0.1, clip=clip), path, **options)


def build(change: Callable[[Tensor, nn.Linear], Tensor] | None = None) -> Breaks:
    torch.manual_seed(0)
    return Breaks(change)


def weights(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.parameters()]


def test_a_loss_that_is_not_finite_stops_before_the_step(tmp_path: Path) -> None:
    model = build(lambda outputs, _: outputs * math.nan)
    run = training(model, tmp_path / "checkpoint")
    with pytest.raises(NonFiniteLoss, match=r"the loss is nan in epoch 2, batch 1; .*checkpoint"):
        run.run()
    assert run.steps == 2
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("change", [flat_root, steep_root])
def test_a_gradient_that_is_not_finite_stops_before_the_step(
    tmp_path: Path, clip: float | None, change: Callable[[Tensor, nn.Linear], Tensor]
) -> None:
    whole = build()
    training(whole, tmp_path / "whole", clip).run()

    path = tmp_path / "checkpoint"
    model = build(change)
    message = r"the gradient's norm is (nan|inf) in epoch 2, batch 1; .*before that batch is in "
    with pytest.raises(NonFiniteLoss, match=message):
        training(model, path, clip).run()

    stored = Breaks()
    load_checkpoint(path, stored)
    for mine, kept in zip(weights(model), weights(stored), strict=True):
        assert bool(kept.isfinite().all())
        assert torch.equal(mine, kept)
    resumed = training(Breaks(), path, clip)  # as after what was wrong is mended
    resumed.resume()
    assert resumed.steps == 2
    resumed.run()
    for mine, expected in zip(weights(resumed.model), weights(whole), strict=True):
        assert torch.equal(mine, expected)


class SpoilAt:
    """A log that makes a weight NaN after a step, as no step of the loop would."""

    def __init__(self, model: Recorder, at: int) -> None:
        self.model, self.at = model, at

    def start(self, step: int, epochs: int) -> None:
        """Nothing to do."""

    def step(self, step: int, values: dict[str, Any]) -> None:
        if step == self.at:
            with torch.no_grad():
                self.model.linear.weight[1, 2] = math.nan

    def epoch(self, step: int, values: dict[str, Any]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize(
    ("save_every", "spoilt_at", "kept"),
    [(1, 3, 2), (None, 3, 2), (None, 4, 2)],
    ids=["every step", "next loss", "end of epoch"],
)
def test_parameters_that_are_not_finite_are_never_saved(
    tmp_path: Path, save_every: int | None, spoilt_at: int, kept: int
) -> None:
    path = tmp_path / "checkpoint"
    model = build()
    logs = [SpoilAt(model, spoilt_at)]
    run = training(model, path, save_every=save_every, logs=logs)
    message = r"the parameter linear\.weight is not finite after \d steps; nothing was saved"
    with pytest.raises(NonFiniteLoss, match=message):
        run.run()
    resumed = training(Breaks(), path)
    resumed.resume()
    assert resumed.steps == kept
    assert all(bool(value.isfinite().all()) for value in weights(resumed.model))


def test_a_frozen_parameter_may_hold_infinities(tmp_path: Path) -> None:
    model = build()
    model.bound = nn.Parameter(torch.tensor([math.inf]), requires_grad=False)
    training(model, tmp_path / "checkpoint").run()


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(st.lists(st.floats(width=32), max_size=4), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_largest_entry_is_finite_where_all_are(
    rows: list[list[float]], dtype: torch.dtype
) -> None:
    found = largest_entry(
        torch.tensor(row, dtype=dtype if index else torch.float32) for index, row in enumerate(rows)
    )
    entries = [abs(value) for row in rows for value in row]
    if any(math.isnan(value) for value in entries):
        assert math.isnan(found)
    else:
        assert found == max(entries, default=0.0)

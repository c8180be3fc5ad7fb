"""Buffers that are in no state dict come back after a loader has left them empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from implicit_attn.checkpoint import restore_constants
from implicit_attn.models import EquilibriumTransformer, ImageClassifier


def build(size: int = 8) -> ImageClassifier:
    torch.manual_seed(0)
    return ImageClassifier(EquilibriumTransformer(8, 2), size, 1, 3, readout="mean")


class Shared(nn.Module):
    """One tensor under two names, and another."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        numbers = torch.arange(4.0)
        for name, value in {"a": numbers, "b": numbers, "c": torch.arange(size)}.items():
            self.register_buffer(name, value, persistent=False)


def test_a_model_made_on_meta() -> None:
    model, images = build(), torch.rand(2, 1, 8, 8)
    with torch.device("meta"):
        empty, half, shared = build(), build().bfloat16(), Shared()
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    empty.position.fill_(float("nan"))
    restore_constants(empty, build())
    assert torch.equal(empty(images), model(images))
    restore_constants(half, build())  # buffers become real, and dtypes stay
    assert half.position.device.type == "cpu" and half.position.dtype == torch.bfloat16
    torch.testing.assert_close(half.position, build().position.bfloat16())
    restore_constants(shared.to_empty(device="cpu"), Shared())
    for name in ("a", "b"):
        assert torch.equal(shared.get_buffer(name), torch.arange(4.0))


def test_weights_and_buffers_of_the_state_stay() -> None:
    model: Any = nn.BatchNorm1d(3)
    model.running_mean.fill_(2.0)
    nn.init.zeros_(model.weight)
    restore_constants(model, nn.BatchNorm1d(3))
    assert (model.running_mean == 2).all() and (model.weight == 0).all()


def test_a_refused_model_is_left_alone() -> None:
    with pytest.raises(ValueError, match=r"arguments of model; other: .*position"):
        restore_constants(build(), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"arguments of model; other: .*position"):
        restore_constants(build(), build(16))
    model: Any = Shared()
    model.a.fill_(7.0)
    with torch.device("meta"):
        empty = Shared()
    for fresh, words in (
        (Shared(5), "arguments of model; other: .*c"),
        (empty, 'a is on the device "meta"'),
    ):
        with pytest.raises(ValueError, match=words):
            restore_constants(model, fresh)
        assert (model.a == 7).all()

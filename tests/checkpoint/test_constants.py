"""Buffers that are in no state dict come back after a loader has left them empty."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from implicit_attn.checkpoint import restore_constants
from implicit_attn.models import EquilibriumTransformer, ImageClassifier


def build(size: int = 8) -> ImageClassifier:
    torch.manual_seed(0)
    backbone = EquilibriumTransformer(8, 2)
    return ImageClassifier(backbone, size, 1, 3, readout="mean")


def test_a_model_made_on_meta() -> None:
    model, images = build(), torch.rand(2, 1, 8, 8)
    with torch.device("meta"):
        empty = build()
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    empty.position.fill_(float("nan"))
    restore_constants(empty, build())
    assert torch.equal(empty(images), model(images))
    assert empty.position is not build().position


def test_meta_buffers_become_real_and_dtypes_stay() -> None:
    with torch.device("meta"):
        empty = build().bfloat16()
    restore_constants(empty, build())
    assert empty.position.device.type == "cpu" and empty.position.dtype == torch.bfloat16
    torch.testing.assert_close(empty.position, build().position.bfloat16())


def test_weights_and_buffers_of_the_state_stay() -> None:
    model, fresh = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model.running_mean.fill_(2.0)  # type: ignore[union-attr]
    nn.init.zeros_(model.weight)
    restore_constants(model, fresh)
    assert (model.running_mean == 2).all() and (model.weight == 0).all()  # type: ignore[union-attr]


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"only one of them has .*position"):
        restore_constants(build(), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"position is \(16, 8\) there and \(4, 8\) here"):
        restore_constants(build(), build(16))


class Shared(nn.Module):
    """One tensor under two names, and another."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        numbers = torch.arange(4.0)
        for name, value in {"a": numbers, "b": numbers, "c": torch.arange(size)}.items():
            self.register_buffer(name, value, persistent=False)


def test_a_tensor_with_two_names_comes_back_under_both() -> None:
    with torch.device("meta"):
        model = Shared()
    model.to_empty(device="cpu")
    restore_constants(model, Shared())
    for name in ("a", "b"):
        assert torch.equal(model.get_buffer(name), torch.arange(4.0))


def test_a_refused_model_is_left_alone() -> None:
    model = Shared()
    model.a.fill_(7.0)  # type: ignore[operator, union-attr]
    with torch.device("meta"):
        empty = Shared()
    for fresh, words in ((Shared(5), r"c is \(5,\) there"), (empty, 'a is on the device "meta"')):
        with pytest.raises(ValueError, match=words):
            restore_constants(model, fresh)
        assert (model.a == 7).all()  # type: ignore[union-attr]

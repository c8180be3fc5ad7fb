"""ImageData's checks, and the generators of epochs and batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_attn.data import ImageData, epoch_generator


def image_data(**changes: Any) -> ImageData:
    parts: dict[str, Any] = {
        "name": "toy",
        "classes": 3,
        "train_images": torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(0)),
        "train_labels": torch.tensor([0, 1, 2, 0]),
        "test_images": torch.zeros(2, 1, 2, 2),
        "test_labels": torch.tensor([2, 1]),
    }
    return ImageData(**(parts | changes))


def test_some_of_the_images_are_the_first_or_of_all_classes() -> None:
    data = image_data()
    assert torch.equal(data.first(2).train_images, data.train_images[:2])
    assert data.first(None) is data and len(data.first(9).train_labels) == 4
    labels = torch.arange(3).repeat_interleave(4)
    images = torch.rand(12, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    ordered = {"train_images": images, "train_labels": labels}
    ordered |= {"test_images": images, "test_labels": labels}
    by_class = image_data(**ordered)
    assert by_class.first(6).train_labels.tolist() == [0, 0, 1, 1, 2, 2]
    some, own = by_class.some_test(5)
    assert own.tolist() == [0, 0, 1, 1, 2] and torch.equal(some, images[[0, 2, 4, 7, 9]])
    assert len(by_class.some_test(None)[1]) == 12


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (TypeError, {"train_images": torch.rand(4, 1, 2, 2).double()}, "train_images.*float64"),
        (TypeError, {"test_labels": torch.tensor([2, 1]).int()}, "test_labels.*torch.int32"),
        (ValueError, {"train_images": torch.rand(4, 2, 2)}, r"train_images \(4, 2, 2\)"),
        (ValueError, {"train_labels": torch.tensor([0, 1, 2])}, r"train_labels \(3,\)"),
        (ValueError, {"test_images": torch.zeros(2, 1, 3, 2)}, r"test_images is \(1, 3, 2\)"),
        (ValueError, {"test_images": torch.zeros(0, 1, 2, 2)}, r"test_images \(0, 1, 2, 2\)"),
        (ValueError, {"train_labels": torch.tensor([0, 1, 3, 0])}, r"train_labels lie in \[0, 3\]"),
        (ValueError, {"train_labels": torch.tensor([0, 1, -1, 0])}, r"lie in \[-1, 1\]"),
        (ValueError, {"test_images": torch.full((2, 1, 2, 2), 255.0)}, r"lie in \[255.0, 255.0\]"),
        (ValueError, {"test_images": torch.full((2, 1, 2, 2), torch.nan)}, r"lie in \[nan, nan\]"),
    ],
)
def test_bad_data_are_named(
    error: type[Exception], changes: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(error, match=message):
        image_data(**changes)


def test_generators_of_batches_are_streams_of_their_own() -> None:
    keys = [(0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    draws = {key: torch.rand(4, generator=epoch_generator(*key)) for key in keys}
    assert len({tuple(drawn.tolist()) for drawn in draws.values()}) == len(keys)
    assert all(torch.rand(4, generator=epoch_generator(*k)).equal(v) for k, v in draws.items())
    for wrong, name in (((-1, 0), "seed"), ((0, -1), "epoch"), ((0, 0, -1), "batch")):
        with pytest.raises(ValueError, match=f"{name} must be >= 0, got -1"):
            epoch_generator(*wrong)

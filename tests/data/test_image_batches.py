"""ImageData's checks, the stratified hold-out, and the order of batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from implicit_attn.data import ImageData, batches, epoch_generator, stratified_holdout


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


@settings(deadline=None, max_examples=50)
@given(
    counts=st.lists(st.integers(5, 40), min_size=1, max_size=5),
    fraction=st.sampled_from([0.1, 0.2, 0.5, 0.8]),
    seed=st.integers(0, 2**31),
)
def test_holdout_is_a_stratified_partition(counts: list[int], fraction: float, seed: int) -> None:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    if any(not 0 < round(fraction * count) < count for count in counts):
        with pytest.raises(ValueError, match="too few to hold out"):
            stratified_holdout(labels, fraction, seed)
        return
    kept, held_out = stratified_holdout(labels, fraction, seed)
    assert torch.equal(torch.cat([kept, held_out]).sort().values, torch.arange(len(labels)))
    assert torch.equal(kept, kept.sort().values)
    assert torch.equal(held_out, held_out.sort().values)
    expected = [round(fraction * count) for count in counts]
    assert labels[held_out].bincount(minlength=len(counts)).tolist() == expected


@pytest.mark.parametrize(
    ("labels", "fraction", "message"),
    [
        (torch.zeros(0, dtype=torch.int64), 0.2, r"labels has shape \(0,\)"),
        (torch.zeros(4, 2, dtype=torch.int64), 0.2, r"labels has shape \(4, 2\)"),
        (torch.zeros(10, dtype=torch.int64), 0.0, "fraction is 0.0"),
        (torch.zeros(10, dtype=torch.int64), 1.0, "fraction is 1.0"),
        (torch.zeros(10, dtype=torch.int64), float("nan"), "fraction is nan"),
        (torch.tensor([0] * 10 + [7]), 0.2, "class 7 has 1 members"),
    ],
)
def test_holdout_names_what_is_wrong(labels: Tensor, fraction: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stratified_holdout(labels, fraction, seed=0)


IMAGES = torch.arange(23).float().reshape(23, 1, 1, 1)
LABELS = torch.arange(23)


def order(seed: int, epoch: int, size: int = 5) -> list[int]:
    pairs = batches(IMAGES, LABELS, size, epoch_generator(seed, epoch))
    return [label for _, labels in pairs for label in labels.tolist()]


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 40), size=st.integers(1, 50), shuffled=st.booleans())
def test_an_epoch_visits_every_sample_once(count: int, size: int, shuffled: bool) -> None:
    images, labels = torch.arange(count).float().reshape(count, 1, 1, 1), torch.arange(count)
    generator = epoch_generator(0, 0) if shuffled else None
    pairs = list(batches(images, labels, size, generator))
    assert [len(part) for _, part in pairs[:-1]] == [size] * ((count - 1) // size)
    assert 1 <= len(pairs[-1][1]) <= size
    seen = torch.cat([part for _, part in pairs])
    assert torch.equal(seen.sort().values, labels)
    assert torch.equal(torch.cat([part for part, _ in pairs]).flatten(), seen.float())
    if not shuffled:
        assert torch.equal(seen, labels)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    table = {(seed, epoch): order(seed, epoch) for seed in range(4) for epoch in range(4)}
    stratified_holdout(LABELS % 2, 0.2, seed=1)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is left alone
    torch.rand(100)  # whatever else was drawn in between
    assert all(order(*key) == drawn for key, drawn in table.items())
    assert len({tuple(drawn) for drawn in table.values()}) == 16
    generator, seen = epoch_generator(0, 0), list[int]()
    for _, labels in batches(IMAGES, LABELS, 5, generator):
        torch.rand(3, generator=generator)  # nor does it matter what the batches draw
        seen += labels.tolist()
    assert seen == table[0, 0]


def test_generators_of_batches_are_streams_of_their_own() -> None:
    keys = [(0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    draws = {key: torch.rand(4, generator=epoch_generator(*key)) for key in keys}
    assert len({tuple(drawn.tolist()) for drawn in draws.values()}) == len(keys)
    assert all(torch.rand(4, generator=epoch_generator(*k)).equal(v) for k, v in draws.items())
    for wrong, name in (((-1, 0), "seed"), ((0, -1), "epoch"), ((0, 0, -1), "batch")):
        with pytest.raises(ValueError, match=f"{name} must be >= 0, got -1"):
            epoch_generator(*wrong)


@pytest.mark.parametrize(
    ("error", "images", "labels", "size", "message"),
    [
        (ValueError, IMAGES, LABELS, 0, "size must be >= 1, got 0"),
        (ValueError, IMAGES, LABELS, -1, "size must be >= 1, got -1"),
        (TypeError, IMAGES, LABELS, 2.5, "size must be an integer, got 2.5"),
        (TypeError, IMAGES, LABELS, True, "size must be an integer, got True"),
        (ValueError, IMAGES, LABELS[:-1], 5, r"labels \(22,\)"),
        (ValueError, IMAGES[:0], LABELS[:0], 5, r"images \(0, 1, 1, 1\)"),
    ],
)
def test_bad_batches_are_refused_at_the_call(
    error: type[Exception], images: Tensor, labels: Tensor, size: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        batches(images, labels, size)

"""The tasks of ``benchmarks/learning.py``: shapes, the same every time, nothing leaks into the test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("sklearn", reason="the digits are scikit-learn's")

from benchmarks.learns import images
from benchmarks.learns.images import cifar10, digits, patches, same_different
from benchmarks.learns.recall import ASKED, KEYS, PAIRS, VALUES, recall, sequences
from benchmarks.learns.registry import TASKS
from benchmarks.learns.task import Task
from implicit_attn.data import ImageData

MADE = ("digits", "recall", "same-different")
SHAPES = {"digits": (16, 4), "recall": (17, 2), "same-different": (32, 4)}


def same(one: Task, other: Task) -> bool:
    names = ("inputs", "labels", "test_inputs", "test_labels")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("name", MADE)
def test_the_same_every_time_whatever_was_drawn_before(name: str) -> None:
    one = TASKS[name](100)
    torch.manual_seed(7)
    torch.rand(3)
    assert same(one, TASKS[name](100))


@pytest.mark.parametrize("name", MADE)
def test_shapes(name: str) -> None:
    task = TASKS[name](100)
    assert task.inputs.shape == (100, *SHAPES[name]) and task.labels.shape == (100,)
    assert task.test_inputs.shape[1:] == SHAPES[name]
    assert task.labels.min() >= 0 and task.labels.max() < task.classes
    assert task.test_labels.min() >= 0 and task.test_labels.max() < task.classes
    assert task.embed(8)(task.inputs[:3]).shape == (3, task.tokens, 8)
    assert task.validation == 20


def test_patches_hold_each_pixel_once_row_by_row() -> None:
    grid = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6) / 143  # not square
    cut = patches(grid, 2)
    assert cut.shape == (2, 6, 12)
    for token in range(6):
        row, column = 2 * (token // 3), 2 * (token % 3)
        wanted = grid[:, :, row : row + 2, column : column + 2].flatten(1)
        assert torch.equal(cut[:, token], 2 * wanted - 1)


def as_set(rows: Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in rows}


def test_no_test_digit_is_trained_on() -> None:
    task = digits()
    assert (len(task.labels), len(task.test_labels)) == (1437, 360)
    assert not as_set(task.inputs) & as_set(task.test_inputs)


def halves(inputs: Tensor) -> Tensor:
    """Pairs (B, 32, 4) -> their two images (B, 2, 64)."""
    return inputs.view(-1, 4, 2, 4, 4).transpose(1, 2).flatten(2)


def test_same_different_tells_whether_two_other_images_are_of_one_class() -> None:
    whole, task = digits(), same_different(1000)
    everything = zip(
        torch.cat([whole.inputs, whole.test_inputs]).flatten(1),
        torch.cat([whole.labels, whole.test_labels]).tolist(),
        strict=True,
    )
    classes = {image.numpy().tobytes(): label for image, label in everything}
    pairs = torch.cat([halves(task.inputs), halves(task.test_inputs)])
    labels = torch.cat([task.labels, task.test_labels]).tolist()
    for (left, right), label in zip(pairs, labels, strict=True):
        known = [classes[each.contiguous().numpy().tobytes()] for each in (left, right)]
        assert (known[0] == known[1]) == bool(label)
        assert not torch.equal(left, right)
    assert 0.45 < task.labels.double().mean() < 0.55
    assert 0.45 < task.test_labels.double().mean() < 0.55


def test_same_different_keeps_the_images_of_its_parts_apart() -> None:
    whole, task = digits(), same_different(1000)
    kept = len(task.labels) - task.validation
    parts = [task.inputs[:kept], task.inputs[kept:], task.test_inputs]
    first, second, tested = (as_set(halves(part).flatten(0, 1)) for part in parts)
    assert not first & second and not (first | second) & tested
    assert first | second <= as_set(whole.inputs.flatten(1))
    assert tested <= as_set(whole.test_inputs.flatten(1))


def test_recall_asks_for_a_value_that_stands_in_the_sequence() -> None:
    pairs, labels = sequences(300, seed=5)
    assert pairs.shape == (300, 1 + PAIRS, 2)
    for sequence, label in zip(pairs.tolist(), labels.tolist(), strict=True):
        (key, asked), *held = sequence
        assert asked == ASKED and all(value < VALUES for _, value in held)
        assert len({k for k, _ in held}) == PAIRS and all(k < KEYS for k, _ in held)
        assert dict(map(tuple, held))[key] == label


def test_the_asking_token_says_nothing_about_the_answer() -> None:
    """The best guess by the key that is asked for is no better than chance where it was not made."""
    task = recall()
    table = torch.zeros(KEYS, VALUES)
    table.index_put_((task.inputs[:, 0, 0], task.labels), torch.ones(8000), accumulate=True)
    guessed = table.argmax(1)[task.test_inputs[:, 0, 0]]
    assert (guessed == task.test_labels).double().mean() < 1 / VALUES + 0.02
    assert not as_set(task.inputs) & as_set(task.test_inputs)


def test_the_answer_stands_at_any_place() -> None:
    pairs, _ = sequences(3200, seed=6)
    places = (pairs[:, 1:, 0] == pairs[:, :1, 0]).double().argmax(1)
    share = places.bincount(minlength=PAIRS) / len(places)
    assert share.min() > 0.04 and share.max() < 0.085  # 1/16, five standard deviations


def test_a_limit_takes_images_of_all_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-10 comes class by class."""
    labels = torch.arange(10).repeat_interleave(50)
    pictures = (labels / 10).view(-1, 1, 1, 1).expand(-1, 1, 28, 28).contiguous()
    data = ImageData("mnist", 10, pictures, labels, pictures[:20], labels[:20])
    monkeypatch.setattr(images, "load", lambda _: data)
    task = images.mnist(100)
    assert task.inputs.shape == (100, 16, 49) and task.test_inputs.shape == (20, 16, 49)
    assert len(task.labels.unique()) == 10
    assert torch.allclose(task.inputs[:, 0, 0], 2 * task.labels / 10 - 1)


def test_cifar_is_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no copy of CIFAR-10"):
        cifar10(100)

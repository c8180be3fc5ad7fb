"""Tasks made of images: digits, MNIST, CIFAR-10, and whether two digits are the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.learns.task import VALIDATION, Task
from implicit_attn.data import load
from implicit_attn.data.files import find
from implicit_attn.optional import require

READOUTS = ("mean", "class")
DIGITS_TRAINED, PAIRS, TEST_PAIRS = 1437, 8000, 2000


def patches(images: Tensor, side: int) -> Tensor:
    """Images (B, C, H, W) with values in [0, 1] -> (B, N, C side^2) in [-1, 1], row by row."""
    cut = images.unfold(2, side, side).unfold(3, side, side)  # (B, C, rows, columns, side, side)
    return 2 * cut.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2) - 1


def image_task(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], side: int, classes: int, epochs: int
) -> Task:
    """Images and labels, cut into patches that are embedded linearly."""
    inputs, test_inputs = (patches(images, side) for images, _ in (train, test))
    width = inputs.shape[-1]
    return Task(
        classes, inputs, train[1], test_inputs, test[1], lambda dim: nn.Linear(width, dim),
        READOUTS, places=True, pixels=True, epochs=epochs,
    )  # fmt: skip


def digits(limit: int | None = None) -> Task:
    """8x8 digits in 16 patches of 2x2: 1437 training and 360 test images."""
    train, test = _split_digits()
    return image_task(tuple(each[:limit] for each in train), test, 2, 10, 20)  # type: ignore[arg-type]


def mnist(limit: int | None = None) -> Task:
    """28x28 digits in 16 patches of 7x7; a limit takes that many training images at random."""
    return _loaded("mnist", 7, limit, 5)


def cifar10(limit: int | None = None) -> Task:
    """32x32 colour images in 64 patches of 4x4; a limit takes that many training images at random.

    Raises:
        FileNotFoundError: there is no local copy; none is downloaded.
    """
    if find("cifar10", "cifar-10-binary.tar.gz", "cifar10.tar.xz") is None:
        raise FileNotFoundError("no copy of CIFAR-10 in $IMPLICIT_ATTN_DATA/cifar10")
    return _loaded("cifar10", 4, limit, 10)


def same_different(limit: int | None = None) -> Task:
    """Two different images of digits side by side, 32 patches of 2x2: are they of one class?

    Pairs of test images only are tested, and the last fifth of the training pairs is made of
    training images that the others do not hold. Half of the pairs are of one class.
    """
    train, test = _split_digits()
    count = PAIRS if limit is None else limit
    later = max(1, round(VALIDATION * count))
    kept = round((1 - VALIDATION) * len(train[1]))
    parts = [
        _pairs(train[0][:kept], train[1][:kept], count - later, seed=1),
        _pairs(train[0][kept:], train[1][kept:], later, seed=2),
    ]
    images, labels = (torch.cat(both) for both in zip(*parts, strict=True))
    return image_task((images, labels), _pairs(*test, TEST_PAIRS, seed=3), 2, 2, 10)


def _split_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    data = require("sklearn.datasets", extra="examples").load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(data.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:DIGITS_TRAINED], order[DIGITS_TRAINED:]
    return (images[train], labels[train]), (images[test], labels[test])


def _loaded(name: str, side: int, limit: int | None, epochs: int) -> Task:
    data = load(name)  # CIFAR-10 comes class by class, so that its first images are of few classes
    order = torch.randperm(len(data.train_labels), generator=torch.Generator().manual_seed(0))
    chosen = order[:limit]
    train = (data.train_images[chosen], data.train_labels[chosen])
    return image_task(train, (data.test_images, data.test_labels), side, data.classes, epochs)


def _pairs(images: Tensor, labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images (count, 1, 8, 16) of two digits, and 1 where both are of one class."""
    draw = torch.Generator().manual_seed(seed)
    same = torch.randint(2, (count,), generator=draw)
    left = torch.randint(len(labels), (count,), generator=draw)
    fits = labels[left, None].eq(labels).eq(same[:, None].bool())  # (count, images)
    fits[torch.arange(count), left] = False  # never an image beside itself
    right = torch.multinomial(fits.float(), 1, generator=draw).squeeze(1)
    return torch.cat([images[left], images[right]], dim=3), same

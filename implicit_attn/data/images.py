"""Labelled images by name: the digits of scikit-learn, MNIST, Fashion-MNIST and CIFAR-10."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicit_attn.data.files import cache_folder, damaged, find, missing, read_content
from implicit_attn.optional import require
from solvers.core.checks import require_choice, require_count

Part = tuple[Tensor, Tensor]  # images (N, C, H, W) and labels (N,)


@dataclass(frozen=True)
class ImageData:
    """A data set of labelled images, split into training and test.

    Attributes:
        name: as for :func:`load`, or another name for a copy that differs from the original.
        classes: number of classes C.
        train_images, test_images: (N, channels, height, width) float32 in [0, 1].
        train_labels, test_labels: (N,) int64 in 0 .. C - 1.

    Raises:
        ValueError: if images and labels do not fit each other.
    """

    name: str
    classes: int
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def __post_init__(self) -> None:
        shape, labels = (
            self.train_images.shape[1:],
            torch.cat([self.train_labels, self.test_labels]),
        )
        for part in ("train", "test"):
            expected = (len(getattr(self, f"{part}_labels")), *shape)
            found = tuple(getattr(self, f"{part}_images").shape)
            if found != expected or len(found) != 4 or 0 in found:
                raise ValueError(f"{self.name}: {part}_images must be {expected}, got {found}")
        if not bool((labels.clamp(0, self.classes - 1) == labels).all()):
            raise ValueError(f"{self.name}: labels must be below {self.classes}")

    def first(self, limit: int | None) -> ImageData:
        """Return the data with ``limit`` training images, chosen by :func:`some_samples`; None: all."""
        if limit is None:
            return self
        chosen = some_samples(self.train_labels, limit)
        images, labels = self.train_images[chosen], self.train_labels[chosen]
        return replace(self, train_images=images, train_labels=labels)


def some_samples(labels: Tensor, number: int) -> slice | Tensor:
    """Return an index of the first ``number`` samples, or of evenly spaced ones if labels are sorted."""
    number = min(require_count("number", number), len(labels))
    if bool((labels[1:] >= labels[:-1]).all()):
        return torch.arange(number, device=labels.device) * len(labels) // number
    return slice(number)


def from_pixels(name: str, train: Part, test: Part, largest: int = 255) -> ImageData:
    """Return data of 10 classes from pixels in 0 .. ``largest`` and labels of any dtype."""
    (images, labels), (test_images, test_labels) = train, test
    images, test_images = (pixels.float().div_(largest) for pixels in (images, test_images))
    return ImageData(name, 10, images, labels.long(), test_images, test_labels.long())


def load_digits(*, holdout: float = 0.2, seed: int = 0) -> ImageData:
    """Load scikit-learn's digits (N, 1, 8, 8), a stratified share of which is the test set.

    They are the test part of the UCI set "Optical recognition of handwritten digits" (Alpaydin and
    Kaynak, 1998).

    Args:
        holdout: share of every class in the test set, strictly between 0 and 1.
        seed: of the split.
    """
    if not 0 < holdout < 1:
        raise ValueError(f"holdout must lie strictly between 0 and 1, got {holdout}")
    digits = require("sklearn.datasets", extra="examples").load_digits()
    pixels, labels = torch.from_numpy(digits.images).unsqueeze(1), torch.from_numpy(digits.target)
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        held[members[order[: round(holdout * len(members))]]] = True
    # A pixel counts the inked points among 4 x 4.
    return from_pixels("digits", *((pixels[p], labels[p]) for p in (~held, held)), largest=16)


IDX = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip


def load_idx(name: str, kind: str) -> ImageData:
    """Load the four IDX files of MNIST (LeCun et al., 1998) or Fashion-MNIST (N, 1, 28, 28)."""
    paths = [find(name, file, f"{file}.gz") for file in IDX]
    if None in paths:
        return load_torchvision(name, kind, f"{name}/{IDX[paths.index(None)]}.gz")
    train, labels, test, test_labels = (read_idx(path) for path in paths if path)
    return from_pixels(name, (train.unsqueeze(1), labels), (test.unsqueeze(1), test_labels))


def read_idx(path: Path) -> Tensor:
    """Read the uint8 tensor of an IDX file of unsigned bytes, gzipped or not.

    The format is 00 00 08, the number of dimensions, each size as a big-endian uint32, the elements.
    """
    content = read_content(path)
    with damaged(path, "an IDX file of unsigned bytes"):
        if content[:3] != b"\0\0\x08" or not content[3]:
            raise ValueError(f"it begins with {content[:4].hex(' ')}")
        shape = np.frombuffer(content, ">u4", count=content[3], offset=4).tolist()
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * content[3])
        return torch.from_numpy(values.reshape(shape).copy())


JPEG = "cifar10.tar.xz"
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def load_cifar10() -> ImageData:
    """Load CIFAR-10 (Krizhevsky, 2009), (N, 3, 32, 32), from ``cifar10/cifar10.tar.xz`` or torchvision.

    The archive has JPEG files ``train/CLASS/*.jpg`` and ``test/CLASS/*.jpg``. As those are slightly lossy,
    the data are then called "CIFAR-10 (JPEG)".
    """
    path = find("cifar10", JPEG)
    if path is None:
        return load_torchvision("cifar10", "CIFAR10", f"cifar10/{JPEG}")
    image, parts = require("PIL.Image", extra="examples"), list[Part]()
    with (
        damaged(path, "CIFAR-10"),
        tarfile.open(fileobj=io.BytesIO(read_content(path)), mode="r:") as archive,
    ):
        files: Any = {each.name: archive.extractfile(each) for each in archive if each.isfile()}
        for part in ("train", "test"):
            names = sorted(name for name in files if name.startswith(f"{part}/"))
            pictures = [image.open(files[name], formats=["JPEG"]).convert("RGB") for name in names]
            pixels = torch.from_numpy(np.stack([np.asarray(each) for each in pictures]))
            labels = torch.tensor([CLASSES.index(name.split("/")[1]) for name in names])
            parts.append((pixels.permute(0, 3, 1, 2), labels))
        return from_pixels("CIFAR-10 (JPEG)", parts[0], parts[1])


def load_torchvision(name: str, kind: str, file: str) -> ImageData:
    """Load a data set of torchvision, which downloads it into the cache.

    Without torchvision, the error says that ``file`` is missing.
    """
    try:
        make: Any = getattr(require("torchvision.datasets", extra="integrations"), kind)
    except ImportError as cause:
        raise FileNotFoundError(f"{missing(file)}, or install torchvision: {cause}") from cause
    parts = []
    for train in (True, False):
        data = make(str(cache_folder() / "torchvision"), train=train, download=True)
        pixels, labels = torch.as_tensor(data.data), torch.as_tensor(data.targets)
        parts.append(
            (pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2), labels)
        )
    return from_pixels(name, parts[0], parts[1])


LOADERS: dict[str, Callable[[], ImageData]] = {
    "digits": load_digits,
    "mnist": partial(load_idx, "mnist", "MNIST"),
    "fashion-mnist": partial(load_idx, "fashion-mnist", "FashionMNIST"),
    "cifar10": load_cifar10,
}


def load(name: str) -> ImageData:
    """Load the data set ``"digits"``, ``"mnist"``, ``"fashion-mnist"`` or ``"cifar10"``.

    Files in ``$IMPLICIT_ATTN_DATA`` or the cache are read; others are downloaded by torchvision. For the
    digits see :func:`load_digits`.

    Raises:
        ValueError: if the name is unknown or a file is damaged.
        FileNotFoundError: if there is neither the file nor torchvision.
    """
    return LOADERS[require_choice("name", name, LOADERS)]()

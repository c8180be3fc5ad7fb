"""Labelled images by name: the digits of scikit-learn, MNIST, Fashion-MNIST and CIFAR-10."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from implicit_attn.data.files import damaged, download, find, read_content
from implicit_attn.optional import require
from solvers.core.checks import require_count

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
        ValueError: a dtype, a shape or a range differs from those above.
    """

    name: str
    classes: int
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            images, labels = getattr(self, f"{part}_images"), getattr(self, f"{part}_labels")
            shapes = (labels.shape, images.shape[1:]) == (
                images.shape[:1],
                self.train_images.shape[1:],
            )
            kinds = (images.dtype, labels.dtype, images.dim()) == (torch.float32, torch.int64, 4)
            inside = ((images >= 0) & (images <= 1)).all() and (
                labels.clamp(0, self.classes - 1) == labels
            ).all()
            if not (shapes and kinds and inside and images.numel() > 0):
                raise ValueError(
                    f"{self.name}: {part}_images must be float32 (N, channels, height, width) in [0, 1] "
                    f"and {part}_labels int64 (N,) below {self.classes}, got {images.dtype} "
                    f"{tuple(images.shape)} and {labels.dtype} {tuple(labels.shape)}"
                )

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


# The files of a data set, where they are distributed with gzip, and the md5 of archives and contents.
IDX_FILES = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip
IDX_MIRRORS = {
    "mnist": [
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ],
    "fashion-mnist": [
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ],
}
IDX_ARCHIVES = {
    "mnist": (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion-mnist": (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310",
    ),
}  # fmt: skip
IDX_CONTENTS = {
    "mnist": (
        "6bbc9ace898e44ae57da46a324031adb", "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea", "27ae3e4e09519cfbb04c329615203637",
    ),
    "fashion-mnist": (
        "f4a8712d7a061bf5bd6d2ca38dc4d50a", "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a", "15d484375f8d13e6eb1aabb0c3f46965",
    ),
}  # fmt: skip


def load_mnist(name: str = "mnist") -> ImageData:
    """Load MNIST (LeCun et al., 1998), or Fashion-MNIST (https://arxiv.org/abs/1708.07747), (N, 1, 28, 28).

    The four files, gzipped or not, are read from the folder of that name in ``$IMPLICIT_ATTN_DATA`` or
    the cache, or downloaded into the cache. Their decompressed content is checked by md5.
    """
    tensors = []
    for file, packed, md5 in zip(IDX_FILES, IDX_ARCHIVES[name], IDX_CONTENTS[name], strict=True):
        urls = [f"{mirror}{file}.gz" for mirror in IDX_MIRRORS[name]]
        path = find(name, file, f"{file}.gz") or download(name, f"{file}.gz", urls, packed)
        tensors.append(read_idx(path, md5))
    train, labels, test, test_labels = tensors
    return from_pixels(name, (train.unsqueeze(1), labels), (test.unsqueeze(1), test_labels))


def load_fashion_mnist() -> ImageData:
    """Load Fashion-MNIST as :func:`load_mnist` does."""
    return load_mnist("fashion-mnist")


def read_idx(path: str | Path, md5: str | None = None) -> Tensor:
    """Read the uint8 tensor of an IDX file of unsigned bytes, gzipped or not.

    The format is 00 00 08, the number of dimensions, each size as a big-endian uint32, the elements.

    Raises:
        ValueError: the file is damaged, is no such file, or its content has another md5.
    """
    content = read_content(Path(path), md5)
    with damaged(path, "an IDX file of unsigned bytes"):
        if content[:3] != b"\0\0\x08" or not content[3]:
            raise ValueError(f"it begins with {content[:4].hex(' ')}")
        shape = np.frombuffer(content, ">u4", count=content[3], offset=4).tolist()
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * content[3])
        return torch.from_numpy(values.reshape(shape).copy())


BINARY, JPEG = "cifar-10-binary.tar.gz", "cifar10.tar.xz"
URL, MD5 = f"https://www.cs.toronto.edu/~kriz/{BINARY}", "c32a1d4ab5d03f1284b67883e8d87530"
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
BATCHES = {
    "train": [f"data_batch_{number}.bin" for number in range(1, 6)],
    "test": ["test_batch.bin"],
}


def load_cifar10() -> ImageData:
    """Load CIFAR-10 (Krizhevsky, 2009), (N, 3, 32, 32).

    It is read from ``cifar10/cifar-10-binary.tar.gz``, the published binary version, or from
    ``cifar10/cifar10.tar.xz`` with JPEG files ``train/CLASS/*.jpg`` and ``test/CLASS/*.jpg``. As those are
    slightly lossy, the data are then called "CIFAR-10 (JPEG)". Without either, the binary version is
    downloaded into the cache.
    """
    path = find("cifar10", BINARY, JPEG) or download("cifar10", BINARY, [URL], MD5)
    name, read = ("CIFAR-10 (JPEG)", read_jpeg) if path.name == JPEG else ("cifar10", read_binary)
    with damaged(path, "CIFAR-10"):
        found = read(read_tar(path))
        for part, number in (("train", 5000), ("test", 1000)):
            counts = found[part][1].bincount(minlength=10).tolist()
            if counts != 10 * [number]:
                raise ValueError(f"{counts} {part} images of the classes, not {number} of each")
        return from_pixels(name, found["train"], found["test"])


def read_tar(path: Path) -> dict[str, bytes]:
    """Read the files in a compressed tar archive by name, without writing any."""
    with tarfile.open(fileobj=io.BytesIO(read_content(path)), mode="r:") as archive:
        files = ((member.name, archive.extractfile(member)) for member in archive)
        return {name: file.read() for name, file in files if file is not None}


def read_binary(files: dict[str, bytes]) -> dict[str, Part]:
    """Read records of a label and 3072 pixels, red, green and blue."""
    files, found = {name.split("/")[-1]: content for name, content in files.items()}, {}
    for part, names in BATCHES.items():
        content = bytearray(b"".join(files[name] for name in names))
        records = torch.frombuffer(content, dtype=torch.uint8).view(-1, 3073)
        found[part] = records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]
    return found


def read_jpeg(files: dict[str, bytes]) -> dict[str, Part]:
    """Read images in the order of their names within each class."""
    image, found = require("PIL.Image", extra="examples"), {}
    for part in ("train", "test"):
        names = sorted(name for name in files if name.startswith(f"{part}/"))
        pictures = [image.open(io.BytesIO(files[name]), formats=["JPEG"]) for name in names]
        pixels = np.stack([np.asarray(each.convert("RGB")) for each in pictures])
        labels = torch.tensor([CLASSES.index(name.split("/")[1]) for name in names])
        found[part] = torch.from_numpy(pixels).permute(0, 3, 1, 2), labels
    return found


LOADERS: dict[str, Callable[[], ImageData]] = {
    "digits": load_digits,
    "mnist": partial(load_mnist, "mnist"),
    "fashion-mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
}


def load(name: str) -> ImageData:
    """Load the data set ``"digits"``, ``"mnist"``, ``"fashion-mnist"`` or ``"cifar10"``."""
    if name not in LOADERS:
        raise ValueError(f"name must be one of {', '.join(LOADERS)}, got {name!r}")
    return LOADERS[name]()

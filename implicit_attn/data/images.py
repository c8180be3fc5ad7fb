"""Labelled images by name: the digits of scikit-learn, MNIST, Fashion-MNIST and CIFAR-10."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
        name: the one that :func:`implicit_attn.data.load` takes, or another one where a copy differs
            from the original.
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
            if not (
                (images.dtype, labels.dtype, images.dim()) == (torch.float32, torch.int64, 4)
                and labels.shape == images.shape[:1]
                and images.shape[1:] == self.train_images.shape[1:]
                and images.numel() > 0
                and bool(((images >= 0) & (images <= 1)).all())
                and bool(((labels >= 0) & (labels < self.classes)).all())
            ):
                raise ValueError(
                    f"{self.name}: {part}_images must be float32 (N, channels, height, width) in [0, 1] "
                    f"and {part}_labels int64 (N,) below {self.classes}, got {images.dtype} "
                    f"{tuple(images.shape)} and {labels.dtype} {tuple(labels.shape)}"
                )

    def first(self, limit: int | None) -> ImageData:
        """The same data with ``limit`` training images, chosen by :func:`some_samples`; None: all."""
        if limit is None:
            return self
        chosen = some_samples(self.train_labels, limit)
        images, labels = self.train_images[chosen], self.train_labels[chosen]
        return replace(self, train_images=images, train_labels=labels)


def some_samples(labels: Tensor, number: int) -> slice | Tensor:
    """An index of ``number`` samples: the first ones, or evenly spaced ones where labels are sorted."""
    number = min(require_count("number", number), len(labels))
    if bool((labels[1:] >= labels[:-1]).all()):
        return torch.arange(number, device=labels.device) * len(labels) // number
    return slice(number)


def from_pixels(name: str, train: Part, test: Part, largest: int = 255) -> ImageData:
    """10 classes, from pixels in 0 .. ``largest`` and labels of any dtype."""
    parts = [(pixels.float().div_(largest), labels.long()) for pixels, labels in (train, test)]
    return ImageData(name, 10, *parts[0], *parts[1])


def load_digits(*, holdout: float = 0.2, seed: int = 0) -> ImageData:
    """Digits (N, 1, 8, 8) with a stratified hold-out as the test set.

    The images are the test part of the UCI set "Optical recognition of handwritten digits"
    (Alpaydin and Kaynak, 1998), as embedded in scikit-learn.

    Args:
        holdout: share of every class that becomes the test set, strictly between 0 and 1.
        seed: of the split; the same seed gives the same split everywhere.
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


# Where the gzipped files are distributed, and the md5 of each archive and of its content.
IDX_MIRRORS = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion-mnist": (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
}
IDX_FILES = {
    "mnist": {
        "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
        "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
        "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
        "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        "train-labels-idx1-ubyte": ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
        "t10k-images-idx3-ubyte": ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
        "t10k-labels-idx1-ubyte": ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
    },
}  # fmt: skip


def load_mnist(name: str = "mnist") -> ImageData:
    """MNIST (LeCun, Bottou, Bengio, Haffner, 1998) or Fashion-MNIST, (N, 1, 28, 28), in its own split.

    The four files, gzipped or not, are looked for in the folder of that name within
    ``$IMPLICIT_ATTN_DATA``, then in the cache, and downloaded into the cache by pooch. Their
    decompressed content is checked by md5.
    """
    tensors = []
    for file, (packed, content) in IDX_FILES[name].items():
        archive = f"{file}.gz"
        urls = [mirror + archive for mirror in IDX_MIRRORS[name]]
        path = find(name, file, archive) or download(name, archive, urls, packed)
        tensors.append(read_idx(path, content))
    train, labels, test, test_labels = tensors
    return from_pixels(name, (train.unsqueeze(1), labels), (test.unsqueeze(1), test_labels))


def load_fashion_mnist() -> ImageData:
    """Fashion-MNIST (https://arxiv.org/abs/1708.07747); files as for :func:`load_mnist`."""
    return load_mnist("fashion-mnist")


def read_idx(path: str | Path, md5: str | None = None) -> Tensor:
    """The uint8 tensor in an IDX file of unsigned bytes, gzipped or not.

    Format: 00 00 08, the number of dimensions, each dimension as a big-endian uint32, the elements.

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
BINARY_URL, BINARY_MD5 = (
    f"https://www.cs.toronto.edu/~kriz/{BINARY}",
    "c32a1d4ab5d03f1284b67883e8d87530",
)
CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
COLOURS = (3, 32, 32)  # the shape of an image


def load_cifar10() -> ImageData:
    """CIFAR-10 (Krizhevsky, 2009), (N, 3, 32, 32), in its own split.

    ``$IMPLICIT_ATTN_DATA/cifar10``, then the cache, are searched for the binary version
    ``cifar-10-binary.tar.gz`` and for ``cifar10.tar.xz`` with JPEG files ``train/CLASS/*.jpg`` and
    ``test/CLASS/*.jpg``, which are slightly lossy: the data are then called "CIFAR-10 (JPEG)". Without
    either, the binary version is downloaded into the cache.
    """
    path = find("cifar10", BINARY, JPEG)
    path = path or download("cifar10", BINARY, [BINARY_URL], BINARY_MD5)
    jpeg = path.name == JPEG
    name = "CIFAR-10 (JPEG)" if jpeg else "cifar10"
    with damaged(path, "CIFAR-10"):
        found = (_read_jpeg if jpeg else _read_binary)(_members(path))
        for part, number in (("train", 5000), ("test", 1000)):
            counts = found[part][1].bincount(minlength=10).tolist()
            if counts != 10 * [number]:
                raise ValueError(f"{counts} {part} images of the classes, not {number} of each")
        return from_pixels(name, found["train"], found["test"])


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in a compressed tar archive; no name is used as a path."""
    with tarfile.open(fileobj=io.BytesIO(read_content(path)), mode="r:") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if member.isreg() and file is not None:
                yield member.name, file.read()


def _read_binary(members: Iterator[tuple[str, bytes]]) -> dict[str, Part]:
    """Records of a label and 3072 pixels, red, green and blue."""
    files = {name.split("/")[-1]: content for name, content in members if name.endswith(".bin")}
    found = {}
    for part, names in (
        ("train", [f"data_batch_{number}.bin" for number in range(1, 6)]),
        ("test", ["test_batch.bin"]),
    ):
        content = bytearray(b"".join(files[name] for name in names))
        records = torch.frombuffer(content, dtype=torch.uint8).view(-1, 3073)
        found[part] = records[:, 1:].reshape(-1, *COLOURS), records[:, 0]
    return found


def _read_jpeg(members: Iterator[tuple[str, bytes]]) -> dict[str, Part]:
    """Images in the order of their names within each class."""
    image = require("PIL.Image", extra="examples")
    files = sorted((*name.split("/"), content) for name, content in members if name.count("/") == 2)
    found: dict[str, Part] = {}
    for part in ("train", "test"):
        own = [
            (CLASSES.index(label), content) for place, label, _, content in files if place == part
        ]
        pixels = torch.empty(len(own), *COLOURS, dtype=torch.uint8)
        for row, (_, content) in zip(pixels, own, strict=True):
            picture = image.open(io.BytesIO(content), formats=["JPEG"])
            row.copy_(torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1))
        found[part] = pixels, torch.tensor([label for label, _ in own])
    return found


LOADERS: dict[str, Callable[[], ImageData]] = {
    "digits": load_digits,
    "mnist": load_mnist,
    "fashion-mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
}


def load(name: str) -> ImageData:
    """The data set ``"digits"``, ``"mnist"``, ``"fashion-mnist"`` or ``"cifar10"``."""
    if name not in LOADERS:
        raise ValueError(f"name must be one of {', '.join(LOADERS)}, got {name!r}")
    return LOADERS[name]()

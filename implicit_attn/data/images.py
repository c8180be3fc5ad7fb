"""Labelled images: sets by name and their readers, patches, augmentations; generators that repeat exactly."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.data.files import (
    MOST_BYTES,
    RemoteFile,
    check_md5,
    damaged,
    download,
    fetch,
    find,
    read_content,
    read_members,
)
from implicit_attn.optional import require
from solvers.core.checks import require_count, require_nonnegative


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
        TypeError, ValueError: a dtype, a shape or a range differs from those above.
    """

    name: str
    classes: int
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            self._check(part, getattr(self, f"{part}_images"), getattr(self, f"{part}_labels"))
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise ValueError(
                f"{self.name}: an image of test_images is {tuple(self.test_images.shape[1:])}, "
                f"expected {tuple(self.train_images.shape[1:])} as in train_images"
            )

    def first(self, limit: int | None) -> ImageData:
        """The same data with ``limit`` training images only; None: all of them.

        The first ones; of images that are sorted by their classes, as many evenly spaced ones, which
        have all classes.

        Raises:
            ValueError: there are several classes, and these images are all of one.
        """
        if limit is None:
            return self
        chosen = some_samples(self.train_labels, limit)
        images, labels = self.train_images[chosen], self.train_labels[chosen]
        if self.classes > 1 and bool((labels == labels[0]).all()):
            raise ValueError(
                f"limit must leave training images of two classes at least, got {limit}"
            )
        return replace(self, train_images=images, train_labels=labels)

    def some_test(self, number: int | None) -> tuple[Tensor, Tensor]:
        """``number`` test images (None: all) and their labels, chosen as those of :meth:`first`."""
        every = len(self.test_labels) if number is None else number
        chosen = some_samples(self.test_labels, every)
        return self.test_images[chosen], self.test_labels[chosen]

    def to(self, device: torch.device | str) -> ImageData:
        """The same data on another device."""
        names = ("train_images", "train_labels", "test_images", "test_labels")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def _check(self, part: str, images: Tensor, labels: Tensor) -> None:
        name = f"{self.name}: {part}"
        if images.dtype != torch.float32 or labels.dtype != torch.int64:
            raise TypeError(
                f"{name}_images and {part}_labels are {images.dtype} and {labels.dtype}, expected "
                "torch.float32 and torch.int64"
            )
        if images.dim() != 4 or images.numel() == 0 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"{name}_images {tuple(images.shape)} and {part}_labels {tuple(labels.shape)}, expected "
                "(N, channels, height, width) and (N,), none empty"
            )
        for what, values, top in (("images", images, 1), ("labels", labels, self.classes - 1)):
            low, high = values.min().item(), values.max().item()
            if not (low >= 0 and high <= top):  # NaN compares false
                raise ValueError(f"{name}_{what} lie in [{low}, {high}], expected [0, {top}]")


def some_samples(targets: Tensor, number: int) -> slice | Tensor:
    """An index of ``number`` samples: the first, or where targets are sorted labels evenly spaced ones."""
    number = min(require_count("number", number), len(targets))
    labels = targets.dim() == 1 and not targets.is_floating_point()
    if labels and bool((targets[1:] >= targets[:-1]).all()):
        return torch.arange(number, device=targets.device) * len(targets) // number
    return slice(number)


def from_pixels(
    name: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], *, largest: int = 255
) -> ImageData:
    """10 classes, from pairs of pixels (N, C, H, W) in 0 .. ``largest`` and labels (N,)."""
    parts = [(pixels.float().div_(largest), labels.long()) for pixels, labels in (train, test)]
    return ImageData(name, 10, *parts[0], *parts[1])


# Patches; the pixels of hidden ones are NaN.


def split_patches(images: Tensor, patch: int) -> Tensor:
    """Images (B, C, S, S) -> the pixels of their patches (B, N, C patch^2), row by row.

    Raises:
        ValueError: the images are not square, or ``patch`` does not divide their side.
    """
    batch, channels, size, width = images.shape
    if size != width or size % require_count("patch", patch):
        raise ValueError(
            f"patch must divide the side of square images, got {patch} for {size} x {width}"
        )
    side = size // patch
    parts = images.reshape(batch, channels, side, patch, side, patch)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(batch, side * side, -1)


def join_patches(pixels: Tensor, patch: int) -> Tensor:
    """The inverse of :func:`split_patches`: (B, N, C patch^2) -> (B, C, S, S), S = sqrt(N) patch."""
    batch, number, _ = pixels.shape
    side = math.isqrt(number)
    parts = pixels.reshape(batch, side, side, -1, patch, patch)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, side * patch, side * patch)


def hidden_patches(images: Tensor, patch: int) -> Tensor:
    """(B, N) bool, True where a patch of the images (B, C, S, S) holds a NaN."""
    return split_patches(images, patch).isnan().any(-1)


def hide_patches(images: Tensor, hidden: Tensor, patch: int) -> Tensor:
    """The images (B, C, S, S) with NaN in all pixels of the patches ``hidden`` (B, N) bool."""
    pixels = split_patches(images, patch)
    return join_patches(pixels.masked_fill(hidden.unsqueeze(-1), math.nan), patch)


# Generators.


def hash_seed(stream: tuple[int, ...], **numbers: int) -> int:
    """A seed below 2^64 from ``numbers``, by numpy's ``SeedSequence``, unrelated to its neighbours'.

    ``stream`` keeps uses apart that have equal numbers: () are the epochs, (1,) the batches, (2,)
    the steps of a model.
    """
    for name, value in numbers.items():
        require_count(name, value, low=0)
    sequence = np.random.SeedSequence([*numbers.values()], spawn_key=stream)
    return int(sequence.generate_state(1, np.uint64)[0])


def epoch_generator(seed: int, epoch: int, batch: int | None = None) -> torch.Generator:
    """A CPU generator whose numbers depend on ``(seed, epoch)`` only, or on those and ``batch``.

    A resumed training draws the same order as one that was never interrupted.

    Raises:
        ValueError: ``seed``, ``epoch`` or ``batch`` is negative.
    """
    stream, of_batch = ((), {}) if batch is None else ((1,), {"batch": batch})
    return torch.Generator().manual_seed(hash_seed(stream, seed=seed, epoch=epoch, **of_batch))


@dataclass(frozen=True)
class RandomAffine:
    """Each image rotated, scaled, sheared and shifted at random, by bilinear interpolation.

    The draws are uniform within plus and minus the bounds; pixels from outside the image are 0.

    Attributes:
        rotation: degrees.
        scale: relative, in [0, 1).
        shear: horizontal, pixels per pixel.
        shift: pixels, each way.

    Call: ``augment(images (B, C, H, W), generator) -> (B, C, H, W)``.
    """

    rotation: float = 10.0
    scale: float = 0.1
    shear: float = 0.1
    shift: float = 2.0

    def __post_init__(self) -> None:
        for bound in fields(self):
            require_nonnegative(bound.name, getattr(self, bound.name))
        if self.scale >= 1:
            raise ValueError(f"scale must be < 1, got {self.scale!r}")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        batch, _, height, width = _image_shape(images)
        draws = torch.rand(5, batch, generator=generator).mul_(2).sub_(1).to(images)
        angle = draws[0] * math.radians(self.rotation)
        size = 1 + self.scale * draws[1]
        cosine, sine = angle.cos() * size, angle.sin() * size
        # affine_grid maps the output to the input, in units of half the image.
        across = draws[3] * (2 * self.shift / width)
        down = draws[4] * (2 * self.shift / height)
        first = torch.stack([cosine, self.shear * draws[2] - sine, across], dim=1)
        second = torch.stack([sine, cosine, down], dim=1)
        grid = F.affine_grid(torch.stack([first, second], dim=1), list(images.shape), False)
        return F.grid_sample(images, grid, align_corners=False)


@dataclass(frozen=True)
class RandomCrop:
    """Each image padded with 0, ``padding`` pixels on every side, and cut to its size at random.

    Call: ``augment(images (B, C, H, W), generator) -> (B, C, H, W)``.
    """

    padding: int = 4

    def __post_init__(self) -> None:
        require_count("padding", self.padding, low=0)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        batch, channels, height, width = _image_shape(images)
        places = torch.randint(2 * self.padding + 1, (2, batch, 1), generator=generator)
        places = places.to(images.device)
        rows = places[0] + torch.arange(height, device=images.device)  # (B, H)
        columns = places[1] + torch.arange(width, device=images.device)  # (B, W)
        padded = F.pad(images, 4 * [self.padding])
        padded = padded.gather(2, rows[:, None, :, None].expand(-1, channels, -1, padded.shape[3]))
        return padded.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1))


@dataclass(frozen=True)
class RandomFlip:
    """Each image mirrored left to right with a probability.

    Call: ``augment(images (B, C, H, W), generator) -> (B, C, H, W)``.
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability must lie in [0, 1], got {self.probability!r}")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        batch = _image_shape(images)[0]
        flipped = torch.rand(batch, 1, 1, 1, generator=generator) < self.probability
        return torch.where(flipped.to(images.device), images.flip(3), images)


class Compose:
    """Augmentations ``augment(images, generator)`` in order, drawn from the same generator."""

    def __init__(self, *augments: Callable[[Tensor, torch.Generator], Tensor]) -> None:
        self.augments = augments

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        for augment in self.augments:
            images = augment(images, generator)
        return images


def _image_shape(images: Tensor) -> tuple[int, int, int, int]:
    if images.dim() != 4 or not images.is_floating_point():
        raise ValueError(
            f"images must be floating (B, C, H, W), got {images.dtype} {tuple(images.shape)}"
        )
    batch, channels, height, width = images.shape
    return batch, channels, height, width


def load_digits(*, holdout: float = 0.2, seed: int = 0) -> ImageData:
    """Digits with a stratified hold-out as the test set.

    The images are the test part of the UCI set "Optical recognition of handwritten digits"
    (Alpaydin and Kaynak, 1998), as embedded in scikit-learn.

    Args:
        holdout: share of every class that becomes the test set, strictly between 0 and 1.
        seed: of the split; the same seed gives the same split everywhere.

    Returns:
        :class:`ImageData` with images (N, 1, 8, 8) and 10 classes.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: ``holdout`` is out of range.
    """
    digits = require("sklearn.datasets", extra="examples").load_digits()
    pixels, labels = torch.from_numpy(digits.images).unsqueeze(1), torch.from_numpy(digits.target)
    if not 0 < holdout < 1:
        raise ValueError(f"holdout must lie strictly between 0 and 1, got {holdout}")
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        held[members[order[: round(holdout * len(members))]]] = True
    train, test = ((pixels[part], labels[part]) for part in (~held, held))
    return from_pixels("digits", train, test, largest=16)  # inked pixels of 4x4


# MNIST and Fashion-MNIST: 60,000 training and 10,000 test images of 28x28, 10 classes.

# md5 of the distributed archive, md5 of what is in it
_MNIST = {
    "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
}  # fmt: skip
_FASHION = {
    "train-images-idx3-ubyte": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    "train-labels-idx1-ubyte": ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
    "t10k-images-idx3-ubyte": ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
    "t10k-labels-idx1-ubyte": ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
}  # fmt: skip
_SHAPES = ((60_000, 28, 28), (60_000,), (10_000, 28, 28), (10_000,))


def _files(
    folder: str, checksums: dict[str, tuple[str, str]], *mirrors: str
) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(folder, name, *md5s, mirrors, 4 + 4 * len(shape) + math.prod(shape))
        for (name, md5s), shape in zip(checksums.items(), _SHAPES, strict=True)
    )


MNIST_FILES = _files(
    "mnist", _MNIST,
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)  # fmt: skip
FASHION_MNIST_FILES = _files(
    "fashion-mnist", _FASHION,
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)  # fmt: skip


def load_mnist() -> ImageData:
    """MNIST (LeCun, Bottou, Bengio, Haffner, 1998), in its own split.

    The four files are looked for in ``$IMPLICIT_ATTN_DATA/mnist``, then in the cache, gzipped or
    not, else downloaded into the cache by pooch. Their decompressed content is checked by md5.

    Returns:
        :class:`ImageData` with images (60000, 1, 28, 28) and (10000, 1, 28, 28).

    Raises:
        FileNotFoundError: a file is in no local folder, and no mirror gave it.
        ImportError: a file is in no local folder, and pooch is not installed.
        NotADirectoryError: ``IMPLICIT_ATTN_DATA`` is not a folder.
        ValueError: a file is corrupt or is another one.
    """
    return _load("mnist", MNIST_FILES)


def load_fashion_mnist() -> ImageData:
    """Fashion-MNIST (https://arxiv.org/abs/1708.07747), as :func:`load_mnist`, in ``fashion-mnist``."""
    return _load("fashion-mnist", FASHION_MNIST_FILES)


def _load(name: str, files: tuple[RemoteFile, ...]) -> ImageData:
    # The checksums of the contents have been checked, and so have the shapes.
    pixels, labels, test_pixels, test_labels = (
        parse_idx(fetch(file), source=f"{file.folder}/{file.name}") for file in files
    )
    return from_pixels(name, (pixels.unsqueeze(1), labels), (test_pixels.unsqueeze(1), test_labels))


def read_idx(path: str | Path, *, most: int = MOST_BYTES) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped or not, into a uint8 tensor of the header's dimensions.

    Bytes 0 and 1 are zero, byte 2 is the type code (8: unsigned bytes), byte 3 the number of dimensions; each
    dimension follows as a big-endian uint32, then the elements in C order. (LeCun, Cortes, Burges: The MNIST
    database, "File formats".)

    Args:
        path: of the file.
        most: bytes that the file may have, once decompressed; no more are unpacked.

    Raises:
        ValueError: not IDX, another type code, no dimensions, a length that does not match the
            header or is over ``most``; the gzip stream is corrupt.
    """
    return parse_idx(read_content(Path(path), most), source=str(path))


def parse_idx(content: bytes, *, source: str) -> Tensor:
    """The tensor in a decompressed IDX file, which errors call ``source``."""
    rank = content[3] if len(content) > 3 else 0
    header = 4 + 4 * rank
    if content[:3] != b"\0\0\x08" or rank == 0:
        raise ValueError(
            f"{source}: the magic number is {content[:4].hex(' ')!r}, expected 00 00 08 and a number of "
            "dimensions >= 1"
        )
    if len(content) < header:
        raise ValueError(f"{source}: {len(content)} bytes, expected {header} of header")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", count=rank, offset=4))
    # math.prod, because a corrupt header can name a size that overflows an int64.
    expected = header + math.prod(shape)
    if len(content) != expected:
        raise ValueError(f"{source}: {len(content)} bytes, expected {expected} for shape {shape}")
    values = np.frombuffer(content, np.uint8, offset=header).copy()
    with damaged(source, f"an array that can have the shape {shape}"):
        return torch.from_numpy(values.reshape(shape))


# CIFAR-10: 50,000 training and 10,000 test colour images of 32x32, 10 classes.

FOLDER = "cifar10"
BINARY = "cifar-10-binary.tar.gz"
BINARY_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
BINARY_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
JPEG = "cifar10.tar.xz"
# In alphabetical order, which is that of the labels.
CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
COUNTS = {"train": 5000, "test": 1000}  # of each class
SHAPE = (3, 32, 32)
MOST_UNPACKED = 2**29  # bytes of an archive of JPEG files; the 60,000 take a quarter of that
LARGEST_JPEG = 2**16  # bytes of one
_RECORD = 1 + 3 * 32 * 32  # a label, then the pixels: red, green, blue, each row by row
_PARTS = {
    "train": tuple(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("cifar-10-batches-bin/test_batch.bin",),
}

Split = tuple[Tensor, Tensor]  # images (N, 3, 32, 32) uint8, labels (N,) uint8


def load_cifar10() -> ImageData:
    """CIFAR-10 (Krizhevsky, 2009), in its own split.

    In ``$IMPLICIT_ATTN_DATA/cifar10``, then in the cache, these are looked for: the binary version
    ``cifar-10-binary.tar.gz``, then ``cifar10.tar.xz`` with JPEG files ``train/CLASS/*.jpg`` and
    ``test/CLASS/*.jpg``, slightly lossy, whose name is "CIFAR-10 (JPEG)". Where there is neither, the
    binary version is downloaded into the cache.

    Returns:
        :class:`ImageData` with images (50000, 3, 32, 32) and (10000, 3, 32, 32).

    Raises:
        FileNotFoundError: there is no local file, and the download failed.
        ImportError: pooch, for the download, or Pillow, for the JPEG files, is not installed.
        ValueError: a file is corrupt or is another one.
    """
    path = find(FOLDER, BINARY, JPEG)
    if path is not None and path.name == JPEG:
        name, parts = "CIFAR-10 (JPEG)", decode_jpeg(path)
    else:
        path = path or download(FOLDER, BINARY, [BINARY_URL], BINARY_MD5)
        name, parts = "cifar10", read_binary(path)
    for part, (_, labels) in parts.items():
        counts = labels.long().bincount(minlength=len(CLASSES)).tolist()
        if counts != len(CLASSES) * [COUNTS[part]]:
            raise ValueError(
                f"{name}: the classes have {counts} {part} images, expected {COUNTS[part]} each"
            )
    return from_pixels(name, parts["train"], parts["test"])


def read_binary(path: Path) -> dict[str, Split]:
    """Training and test part of the binary version; the archive is checked by md5."""
    check_md5(path.read_bytes(), BINARY_MD5, str(path))
    largest = _RECORD * 10_000
    wanted = {name for names in _PARTS.values() for name in names}
    members = read_members(path, most=2 * largest * len(wanted), largest=largest)
    found = {name: content for name, content in members if name in wanted}
    missing = sorted(wanted - found.keys())
    if missing:
        raise ValueError(f"{path}: holds no {missing[0]}")
    return {
        part: parse_binary(b"".join(found[name] for name in names), source=f"{path}: {part}")
        for part, names in _PARTS.items()
    }


def parse_binary(content: bytes, *, source: str) -> Split:
    """Images (N, 3, 32, 32) and labels (N,), uint8, of records of a label and 3072 pixels."""
    if not content or len(content) % _RECORD:
        raise ValueError(f"{source}: {len(content)} bytes, expected a multiple of {_RECORD}")
    records = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).view(-1, _RECORD)
    return records[:, 1:].reshape(-1, *SHAPE).contiguous(), records[:, 0].contiguous()


def decode_jpeg(path: Path, parts: Sequence[str] = ("train", "test")) -> dict[str, Split]:
    """The images of an archive of JPEG files in the order of their names within each class."""
    image = require("PIL.Image", extra="examples")
    found: dict[tuple[str, int, str], Tensor] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", image.DecompressionBombWarning)
        for name, content in read_members(path, most=MOST_UNPACKED, largest=LARGEST_JPEG):
            place = name.split("/")
            if len(place) == 3 and place[0] in parts and place[1] in CLASSES:
                key = (place[0], CLASSES.index(place[1]), place[2])
                found[key] = _decode(image, content, f"{path}: {name}")
    decoded: dict[str, Split] = {}
    for part in parts:
        keys = sorted(key for key in found if key[0] == part)
        if not keys:
            raise ValueError(f"{path}: no images {part}/CLASS/*.jpg")
        labels = torch.tensor([key[1] for key in keys], dtype=torch.uint8)
        decoded[part] = torch.stack([found[key] for key in keys]).contiguous(), labels
    return decoded


def _decode(image: Any, content: bytes, source: str) -> Tensor:
    """(3, 32, 32) uint8; the size that the file declares is checked before it is decoded."""
    with damaged(source, "a JPEG image"), image.open(io.BytesIO(content), formats=["JPEG"]) as file:
        width, height = file.size
        if (width, height) != (32, 32):
            raise ValueError(f"{source} is {(height, width, 3)}, expected (32, 32, 3)")
        return torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1)


LOADERS: dict[str, Callable[[], ImageData]] = {
    "digits": load_digits,
    "mnist": load_mnist,
    "fashion-mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
}


def load(name: str) -> ImageData:
    """Load a data set with its loader's defaults.

    Args:
        name: ``"digits"``, ``"mnist"``, ``"fashion-mnist"`` or ``"cifar10"``.

    Raises:
        ValueError: the name is unknown. The loaders' own errors pass through.
    """
    if name not in LOADERS:
        raise ValueError(f"name is {name!r}, expected one of {', '.join(map(repr, LOADERS))}")
    return LOADERS[name]()

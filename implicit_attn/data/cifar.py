"""CIFAR-10: 50,000 training and 10,000 test colour images of 32x32, 10 classes."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from implicit_attn.data.files import cache_folder, check_md5, download, find
from implicit_attn.data.images import ImageData, from_pixels
from implicit_attn.optional import require

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
    ``test/CLASS/*.jpg``, slightly lossy, whose decoded pixels are kept in the cache and whose name
    is "CIFAR-10 (JPEG)". Where there is neither, the binary version is downloaded into the cache.

    Returns:
        :class:`ImageData` with images (50000, 3, 32, 32) and (10000, 3, 32, 32).

    Raises:
        FileNotFoundError: there is no local file, and the download failed.
        ImportError: pooch, for the download, or Pillow, for the JPEG files, is not installed.
        ValueError: a file is corrupt or is another one.
    """
    path = find(FOLDER, BINARY, JPEG)
    if path is not None and path.name == JPEG:
        name, parts = "CIFAR-10 (JPEG)", read_jpeg(path)
    else:
        path = path or download(FOLDER, JPEG, BINARY, [BINARY_URL], BINARY_MD5)
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
    parts: dict[str, Split] = {}
    with tarfile.open(path) as archive:
        for part, names in _PARTS.items():
            contents = [_member(archive, name, path) for name in names]
            parts[part] = parse_binary(b"".join(contents), source=f"{path}: {part}")
    return parts


def parse_binary(content: bytes, *, source: str) -> Split:
    """Images (N, 3, 32, 32) and labels (N,), uint8, of records of a label and 3072 pixels."""
    if not content or len(content) % _RECORD:
        raise ValueError(f"{source}: {len(content)} bytes, expected a multiple of {_RECORD}")
    records = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).view(-1, _RECORD)
    return records[:, 1:].reshape(-1, *SHAPE).contiguous(), records[:, 0].contiguous()


def read_jpeg(path: Path) -> dict[str, Split]:
    """Training and test part of an archive of JPEG files, decoded once and kept in the cache."""
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False)
    tensors = require("safetensors.torch", extra="examples")
    cached = cache_folder() / FOLDER / f"jpeg-{digest.hexdigest()}.safetensors"
    if not cached.is_file():
        decoded = {
            f"{part}_{what}": tensor
            for part, split in decode_jpeg(path).items()
            for what, tensor in zip(("images", "labels"), split, strict=True)
        }
        cached.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cached.with_name(f"{cached.name}.{os.getpid()}.part")
        tensors.save_file(decoded, str(unfinished))
        os.replace(unfinished, cached)
    stored = tensors.load_file(str(cached))
    return {part: (stored[f"{part}_images"], stored[f"{part}_labels"]) for part in COUNTS}


def decode_jpeg(path: Path, parts: Sequence[str] = ("train", "test")) -> dict[str, Split]:
    """The images of an archive of JPEG files in the order of their names within each class."""
    image = require("PIL.Image", extra="examples")
    found: dict[tuple[str, int, str], Tensor] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            place = Path(member.name).parts
            if len(place) != 3 or place[0] not in parts or place[1] not in CLASSES:
                continue
            content = io.BytesIO(_member(archive, member, path))
            pixels = np.asarray(image.open(content).convert("RGB"))
            if pixels.shape != (32, 32, 3):
                raise ValueError(f"{path}: {member.name} is {pixels.shape}, expected (32, 32, 3)")
            key = (place[0], CLASSES.index(place[1]), place[2])
            found[key] = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    decoded: dict[str, Split] = {}
    for part in parts:
        keys = sorted(key for key in found if key[0] == part)
        if not keys:
            raise ValueError(f"{path}: no images {part}/CLASS/*.jpg")
        labels = torch.tensor([key[1] for key in keys], dtype=torch.uint8)
        decoded[part] = torch.stack([found[key] for key in keys]).contiguous(), labels
    return decoded


def _member(archive: tarfile.TarFile, name: str | tarfile.TarInfo, path: Path) -> bytes:
    """The content of a file in an archive."""
    try:
        file = archive.extractfile(name)
    except KeyError as error:
        raise ValueError(f"{path}: holds no {name}") from error
    if file is None:
        raise ValueError(f"{path}: {name} is not a plain file")
    return file.read()

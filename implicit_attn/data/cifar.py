"""CIFAR-10: 50,000 training and 10,000 test colour images of 32x32, 10 classes."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicit_attn.checkpoint import checksum, replace_file
from implicit_attn.data.files import cache_folder, check_md5, damaged, download, find, read_members
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


def read_jpeg(path: Path) -> dict[str, Split]:
    """Training and test part of an archive of JPEG files, decoded once and kept in the cache.

    A copy in the cache that is damaged is decoded again.
    """
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    cached = cache_folder() / FOLDER / f"jpeg-{digest}.safetensors"
    held = _read_cache(cached)
    if held is None:
        held = decode_jpeg(path)
        names = ("images", "labels")
        tensors = {
            f"{part}_{name}": tensor
            for part, split in held.items()
            for name, tensor in zip(names, split, strict=True)
        }
        save = require("safetensors.torch", extra=None).save
        replace_file(cached, save(tensors, metadata={"checksum": checksum(tensors, {})}))
    return held


def _read_cache(path: Path) -> dict[str, Split] | None:
    """What was decoded before; None where there is nothing, or something damaged."""
    safetensors = require("safetensors", extra=None)
    try:
        with damaged(path, "decoded images"), safetensors.safe_open(str(path), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            whole = (file.metadata() or {}).get("checksum") == checksum(tensors, {})
            held = {part: (tensors[f"{part}_images"], tensors[f"{part}_labels"]) for part in COUNTS}
    except (FileNotFoundError, ValueError):
        return None
    return held if whole else None


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

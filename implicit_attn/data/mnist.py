"""MNIST and Fashion-MNIST: 60,000 training and 10,000 test images of 28x28, 10 classes.

Their files are in the IDX format. Bytes 0 and 1 are zero, byte 2 is the type code (8: unsigned bytes, the
only one here), byte 3 the number of dimensions; each dimension follows as a big-endian uint32, then the
elements in C order. (LeCun, Cortes, Burges: The MNIST database, "File formats".)
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from implicit_attn.data.files import MOST_BYTES, RemoteFile, damaged, fetch, read_content
from implicit_attn.data.images import ImageData, from_pixels

_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_SHAPES = ((60_000, 28, 28), (60_000,), (10_000, 28, 28), (10_000,))


def _files(
    folder: str, mirrors: tuple[str, ...], checksums: tuple[tuple[str, str], ...]
) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(folder, name, *md5s, mirrors, 4 + 4 * len(shape) + math.prod(shape))
        for name, shape, md5s in zip(_NAMES, _SHAPES, checksums, strict=True)
    )


# md5 of the distributed archive, md5 of what is in it; in the order of _NAMES
MNIST_FILES = _files(
    "mnist",
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    (
        ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
        ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
        ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
        ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
    ),
)
FASHION_MNIST_FILES = _files(
    "fashion-mnist",
    (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    (
        ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
        ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
        ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
    ),
)


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
    """Fashion-MNIST (Xiao, Rasul, Vollgraf, https://arxiv.org/abs/1708.07747), in its own split.

    As :func:`load_mnist`, with the folder ``fashion-mnist``.
    """
    return _load("fashion-mnist", FASHION_MNIST_FILES)


def _load(name: str, files: tuple[RemoteFile, ...]) -> ImageData:
    arrays: list[Tensor] = []
    for file, shape in zip(files, _SHAPES, strict=True):
        source = f"{file.folder}/{file.name}"
        array = parse_idx(fetch(file), source=source)
        if array.shape != shape:
            raise ValueError(f"{source}: shape {tuple(array.shape)}, expected {shape}")
        arrays.append(array)
    pixels, labels, test_pixels, test_labels = arrays
    return from_pixels(name, (pixels.unsqueeze(1), labels), (test_pixels.unsqueeze(1), test_labels))


def read_idx(path: str | Path, *, most: int = MOST_BYTES) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped or not, into a uint8 tensor of the header's dimensions.

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

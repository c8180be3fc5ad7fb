"""The IDX format of MNIST: a magic number, big-endian dimensions, then the elements in C order.

Bytes 0 and 1 are zero, byte 2 is the type code, byte 3 the number of dimensions; each dimension
follows as a big-endian uint32. (LeCun, Cortes, Burges: The MNIST database, "File formats".)
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_ELEMENT_TYPES = {
    0x08: np.dtype(">u1"),
    0x09: np.dtype(">i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
_GZIP_MAGIC = b"\x1f\x8b"


def read_content(path: Path) -> bytes:
    """The bytes of a file, decompressed if it is gzipped, whatever its name says.

    Raises:
        OSError: the file cannot be read.
        ValueError: the gzip stream is truncated or corrupt.
    """
    content = path.read_bytes()
    if not content.startswith(_GZIP_MAGIC):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path}: the gzip stream is truncated or corrupt: {error}") from error


def parse_idx(content: bytes, *, source: str) -> Tensor:
    """Read an IDX file's bytes.

    Args:
        content: the whole file, decompressed.
        source: what to call it in an error, usually its path.

    Returns:
        A tensor with the dimensions and the dtype that the header names: uint8, int8, int16, int32,
        float32 or float64.

    Raises:
        ValueError: not IDX, an unknown type code, no dimensions, or a length that does not match
            the header.
    """
    if len(content) < 4:
        raise ValueError(f"{source}: {len(content)} bytes, expected an IDX header of 4 or more")
    zeros, code, rank = content[:2], content[2], content[3]
    if zeros != b"\x00\x00" or code not in _ELEMENT_TYPES or rank == 0:
        known = ", ".join(f"{each:02x}" for each in _ELEMENT_TYPES)
        raise ValueError(
            f"{source}: the magic number is {content[:4].hex(' ')}, expected 00 00, "
            f"a type code in ({known}), and a number of dimensions >= 1"
        )
    header = 4 + 4 * rank
    if len(content) < header:
        raise ValueError(
            f"{source}: truncated: {len(content)} bytes, expected {header} of header "
            f"for {rank} dimensions"
        )
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", count=rank, offset=4))
    element = _ELEMENT_TYPES[code]
    # math.prod, because a corrupt header can name a size that overflows an int64.
    expected = header + math.prod(shape) * element.itemsize
    if len(content) != expected:
        fault = "truncated" if len(content) < expected else "too long"
        raise ValueError(
            f"{source}: {fault}: {len(content)} bytes, expected {expected} for shape {shape} "
            f"with {element.itemsize} bytes an element"
        )
    values = np.frombuffer(content, element, offset=header).astype(element.newbyteorder("="))
    return torch.from_numpy(values.reshape(shape))


def read_idx(path: str | Path) -> Tensor:
    """Read an IDX file, gzipped or not; see :func:`parse_idx` for what is returned and raised."""
    path = Path(path)
    return parse_idx(read_content(path), source=str(path))

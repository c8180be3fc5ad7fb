"""The IDX reader against files written here from the format's description."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from implicit_attn.data import read_idx
from implicit_attn.data.mnist import parse_idx

# type code, struct letter of one big-endian element, dtype, values that show sign and byte order
ELEMENTS = [
    (0x08, "B", torch.uint8, [0, 1, 127, 128, 254, 255]),
    (0x09, "b", torch.int8, [0, 1, -1, 127, -128, 5]),
    (0x0B, "h", torch.int16, [0, 1, -2, 258, 32767, -32768]),
    (0x0C, "i", torch.int32, [0, 1, -2, 16909060, 2**31 - 1, -(2**31)]),
    (0x0D, "f", torch.float32, [0.0, 1.0, -2.5, 1e30, -1e-30, 0.125]),
    (0x0E, "d", torch.float64, [0.0, 1.0, -2.5, 1e300, -1e-300, 0.125]),
]


def idx_bytes(code: int, letter: str, shape: tuple[int, ...], values: list[float]) -> bytes:
    head = struct.pack(f">HBB{len(shape)}I", 0, code, len(shape), *shape)
    return head + struct.pack(f">{len(values)}{letter}", *values)


CONTENT = idx_bytes(0x08, "B", (2, 3), [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("shape", [(6,), (2, 3), (3, 1, 2), (1, 2, 3, 1)])
@pytest.mark.parametrize(("code", "letter", "dtype", "values"), ELEMENTS)
@pytest.mark.parametrize("gzipped", [False, True])
def test_round_trip(
    tmp_path: Path,
    code: int,
    letter: str,
    dtype: torch.dtype,
    values: list[float],
    shape: tuple[int, ...],
    gzipped: bool,
) -> None:
    content = idx_bytes(code, letter, shape, values)
    path = tmp_path / "array"
    path.write_bytes(gzip.compress(content) if gzipped else content)
    array = read_idx(path)
    assert array.dtype == dtype
    assert array.shape == shape
    assert torch.equal(array.flatten(), torch.tensor(values, dtype=dtype))


def test_the_result_is_writable_and_owns_its_memory() -> None:
    first = parse_idx(CONTENT, source="array")
    first.zero_()
    assert parse_idx(CONTENT, source="array").tolist() == [[1, 2, 3], [4, 5, 6]]


def test_an_empty_dimension_is_an_empty_tensor() -> None:
    assert parse_idx(idx_bytes(0x08, "B", (0, 4), []), source="array").shape == (0, 4)


BROKEN = [
    (b"", "0 bytes, expected an IDX header"),
    (CONTENT[:3], "3 bytes, expected an IDX header"),
    (b"\x01" + CONTENT[1:], "magic number is 01 00 08 02"),
    (b"\x00\x01" + CONTENT[2:], "magic number is 00 01 08 02"),
    (b"\x00\x00\x0a\x02" + CONTENT[4:], "magic number is 00 00 0a 02"),
    (b"\x00\x00\x08\x00" + CONTENT[4:], "number of dimensions >= 1"),
    (b"\x89PNG" + CONTENT[4:], "magic number is 89 50 4e 47"),
    (CONTENT[:11], "truncated: 11 bytes, expected 12 of header for 2 dimensions"),
    (CONTENT[:-1], "truncated: 17 bytes, expected 18"),
    (CONTENT + b"\x00", "too long: 19 bytes, expected 18"),
    (struct.pack(">HBB4I", 0, 0x0E, 4, *[2**32 - 1] * 4), "too long: the header declares 27"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
@pytest.mark.parametrize("gzipped", [False, True])
def test_what_is_wrong_is_named(
    tmp_path: Path, content: bytes, message: str, gzipped: bool
) -> None:
    path = tmp_path / "broken-file"
    path.write_bytes(gzip.compress(content) if gzipped else content)
    with pytest.raises(ValueError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def corrupted(archive: bytes, position: int) -> bytes:
    return archive[:position] + bytes([archive[position] ^ 0xFF]) + archive[position + 1 :]


LONG = gzip.compress(idx_bytes(0x08, "B", (500,), [(7 * i * i) % 256 for i in range(500)]), 6)


@pytest.mark.parametrize(
    "archive",
    [LONG[:5], LONG[: len(LONG) // 2], LONG[:-4], corrupted(LONG, -5), corrupted(LONG, 12)],
    ids=["in the header", "in the middle", "in the length", "checksum", "deflate stream"],
)
def test_a_damaged_archive_is_refused(tmp_path: Path, archive: bytes) -> None:
    path = tmp_path / "damaged.gz"
    path.write_bytes(archive)
    with pytest.raises(ValueError, match=r"damaged\.gz: damaged or another file"):
        read_idx(path)


def test_a_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        read_idx(tmp_path / "nothing-here")


def test_numpy_agrees_on_random_content() -> None:
    values = np.random.default_rng(0).integers(-(2**31), 2**31, size=(3, 4, 5), dtype=np.int64)
    content = idx_bytes(0x0C, "i", values.shape, values.flatten().tolist())
    assert len(content) == 4 + 12 + 4 * math.prod(values.shape)
    assert np.array_equal(parse_idx(content, source="array").numpy(), values)

"""Compressed files and archives of unknown origin, unpacked within bounds; nothing is extracted."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

GZIP, XZ, BZ2 = b"\x1f\x8b", b"\xfd7zXZ\x00", b"BZh"
XZ_MEMORY = 2**27  # bytes that an xz stream may ask for; "xz -9" asks for 65 MiB
MOST_MEMBERS = 100_000  # of an archive
_PIECE = 2**18


@contextmanager
def damaged(path: str | Path, expected: str) -> Iterator[None]:
    """The part of a reader that decodes: whatever a decoder raises becomes a ``ValueError``.

    Decoders raise errors of many kinds (``KeyError``, ``struct.error``, ``RecursionError``, ...) on
    a file that is not theirs, and add new ones with their versions. A missing file, permission or
    package stays what it is.

    Raises:
        ValueError: with the file's name, what was expected, and what the decoder said.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError, ImportError):
        raise  # nothing that the content is to blame for
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise  # says it already
        raise ValueError(
            f"{path}: damaged or another file, expected {expected}: {type(error).__name__}: {error}"
        ) from error


class _Xz(io.RawIOBase):
    """A decompressed xz stream that keeps to a limit of memory, unlike ``lzma.LZMAFile``."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.decoder = _xz_decoder()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = b""
        while True:
            if self.decoder.eof:  # another stream may follow, after zeros
                piece = self.decoder.unused_data.lstrip(b"\0") or self._next_piece()
                if not piece:
                    return 0
                self.decoder = _xz_decoder()
            elif self.decoder.needs_input and not piece:
                piece = self.file.read(_PIECE)
                if not piece:
                    raise EOFError("the xz stream ends before its end mark")
            found, piece = self.decoder.decompress(piece, len(buffer)), b""
            if found:
                buffer[: len(found)] = found
                return len(found)

    def _next_piece(self) -> bytes:
        while piece := self.file.read(_PIECE):
            if piece := piece.lstrip(b"\0"):
                return piece
        return b""


def _xz_decoder() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)


def unpacked(file: IO[bytes]) -> Any:
    """A stream of the decompressed content; which compression it is, its first bytes say."""
    start = file.read(len(XZ))
    file.seek(0)
    if start.startswith(GZIP):
        return gzip.GzipFile(fileobj=file)
    if start.startswith(BZ2):
        return bz2.BZ2File(file)
    return io.BufferedReader(_Xz(file)) if start == XZ else file


def read_all(stream: Any, most: int, source: str, *, before: int = 0) -> bytes:
    """The rest of a stream; ``ValueError`` that names ``source`` where it is over ``most`` bytes.

    ``before`` is what was read of it already, for the message.
    """
    pieces, size = list[bytes](), 0
    while piece := stream.read(min(_PIECE, most - size + 1)):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise ValueError(
                f"{source}: too long: over {before + most} bytes, expected at most that"
            )
    return b"".join(pieces)


class _Limited(io.RawIOBase):
    """A stream that fails instead of giving more than ``most`` bytes."""

    def __init__(self, stream: Any, most: int, source: str) -> None:
        self.stream, self.left, self.most, self.source = stream, most, most, source

    def read(self, size: int = -1) -> bytes:
        found = self.stream.read(size if size >= 0 else self.left + 1)
        self.left -= len(found)
        if self.left < 0:
            raise ValueError(
                f"{self.source}: too long: unpacks to over {self.most} bytes, expected at most that"
            )
        return found


def members(path: Path, *, most: int, largest: int) -> Iterator[tuple[tarfile.TarInfo, Member]]:
    """The plain files of a tar archive, compressed or not, in order, each with what reads it.

    The archive is read once from front to end; links and devices are passed over, and no name is
    ever used as a path.

    Args:
        path: of the archive.
        most: bytes of the whole archive, once decompressed.
        largest: bytes of a file that is read.

    Raises:
        ValueError: the archive is damaged, or exceeds one of these, or has over ``MOST_MEMBERS``.
    """
    with path.open("rb") as file, damaged(path, "a tar archive"):
        stream = _Limited(unpacked(file), most, str(path))
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for number, member in enumerate(archive):
                if number >= MOST_MEMBERS:
                    raise ValueError(f"{path}: over {MOST_MEMBERS} files, expected fewer")
                if member.isreg():
                    yield member, Member(archive, member, largest, path)
        read_all(stream, most, str(path))  # what follows the archive: a cut stream is found out


class Member:
    """The content of a file in an archive, read when it is called."""

    def __init__(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, largest: int, path: Path
    ) -> None:
        self.archive, self.member, self.largest, self.path = archive, member, largest, path

    def __call__(self) -> bytes:
        name, size = self.member.name, self.member.size
        if size > self.largest:
            raise ValueError(
                f"{self.path}: {name} has {size} bytes, expected at most {self.largest}"
            )
        with damaged(self.path, "a tar archive"):
            file = self.archive.extractfile(self.member)
            content = b"" if file is None else file.read()
        if len(content) != size:
            raise ValueError(f"{self.path}: {name} has {len(content)} bytes, expected {size}")
        return content

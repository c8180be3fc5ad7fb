"""Data files: found in the user's folder or the cache, or downloaded; unpacked within bounds."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from implicit_attn.optional import require

DATA_VARIABLE = "IMPLICIT_ATTN_DATA"
MOST_BYTES = 2**30  # of a file, once decompressed
GZIP, XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
XZ_MEMORY = 2**27  # bytes that an xz stream may ask for; "xz -9" asks for 65 MiB


@dataclass(frozen=True)
class RemoteFile:
    """A file that is distributed gzipped; local ones are judged by content, however compressed."""

    folder: str  # inside the user's data folder and inside the cache
    name: str  # once decompressed
    archive_md5: str  # of the distributed name + ".gz", checked after a download
    content_md5: str  # of the decompressed file, checked at every reading
    mirrors: tuple[str, ...]  # URLs of folders, each ending in "/", tried in order
    most: int = MOST_BYTES  # bytes once decompressed

    @property
    def archive(self) -> str:
        return f"{self.name}.gz"


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/implicit-attn``, or ``~/.cache/implicit-attn``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "implicit-attn"


def search_folders() -> list[Path]:
    """The folders searched, in order: ``$IMPLICIT_ATTN_DATA`` where it is set, then the cache."""
    named = os.environ.get(DATA_VARIABLE)
    if not named:
        return [cache_folder()]
    if not Path(named).is_dir():
        raise NotADirectoryError(f"{DATA_VARIABLE} is {named!r}, expected an existing folder")
    return [Path(named), cache_folder()]


def find(folder: str, *names: str) -> Path | None:
    """The first of the files ``folder/name`` in the folders searched; None where there is none."""
    places = (base / folder / name for base in search_folders() for name in names)
    return next((place for place in places if place.is_file()), None)


def fetch(file: RemoteFile) -> bytes:
    """The decompressed content of a file: found in a local folder, or downloaded into the cache."""
    path = find(file.folder, file.name, file.archive)
    if path is None:
        urls = [mirror + file.archive for mirror in file.mirrors]
        path = download(file.folder, file.archive, urls, file.archive_md5)
    content = read_content(path, file.most)
    check_md5(content, file.content_md5, f"{path}, decompressed")
    return content


def download(folder: str, name: str, urls: Sequence[str], md5: str) -> Path:
    """``folder/name`` in the cache, by pooch from the first URL that gives it; else FileNotFoundError."""
    places = ", ".join(map(str, search_folders()))
    wanted = f"{folder}/{name} is not in {places}; set {DATA_VARIABLE} to a folder that holds it"
    try:
        pooch = require("pooch", extra="examples")
    except ImportError as error:
        raise ImportError(f"{wanted}; to download it: {error}") from error
    causes: list[str] = []
    for url in urls:
        try:
            cache = cache_folder() / folder
            return Path(pooch.retrieve(url, known_hash=f"md5:{md5}", fname=name, path=cache))
        # requests' errors are OSErrors; pooch raises ValueError for a wrong checksum.
        except (OSError, ValueError) as error:
            causes.append(f"{url}: {type(error).__name__}: {error}")
            response = getattr(error, "response", None)
            if response is not None:
                response.close()  # pooch leaves the connection of a refused request open
    raise FileNotFoundError(f"{wanted}. The download failed: {'; '.join(causes)}")


def check_md5(content: bytes, expected: str, source: str) -> None:
    """Raise a ``ValueError`` that names ``source`` where the md5 of ``content`` is another one."""
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != expected:
        raise ValueError(f"{source}: md5 {digest}, expected {expected}; delete or replace the file")


@contextmanager
def damaged(path: str | Path, expected: str) -> Iterator[None]:
    """The part of a reader that decodes: errors of any kind become a ``ValueError`` with the file's name.

    Decoders raise many kinds (``KeyError``, ``struct.error``, ``RecursionError``, ...) on a file that is
    not theirs. A missing file, permission or package stays what it is.
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


def read_content(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file, decompressed if it is gzip or xz, whatever its name says.

    ValueError where the file is damaged, or has more than ``most`` bytes; no more are unpacked.
    """
    with path.open("rb") as file, damaged(path, "a file that is whole"):
        start = file.read(len(XZ))
        file.seek(0)
        if start == XZ:
            # Unlike lzma.open this keeps to a limit of memory, whatever the header asks for.
            decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)
            content = decoder.decompress(file.read(), most + 1)
            if len(content) <= most and not decoder.eof:
                raise EOFError("the xz stream ends before its end mark")
            if decoder.unused_data.strip(b"\0"):
                raise ValueError("there is something after the xz stream")
        elif start.startswith(GZIP):
            content = _read(gzip.GzipFile(fileobj=file), most + 1)
        else:
            content = _read(file, most + 1)
        if len(content) > most:
            raise ValueError(f"{path}: too long: over {most} bytes, expected at most that")
    return content


def _read(stream: Any, most: int) -> bytes:
    """Up to ``most`` bytes, in pieces: a single call would reserve room for all of them."""
    content = bytearray()
    while piece := stream.read(min(2**18, most - len(content))):
        content += piece
    return bytes(content)


def read_members(path: Path, most: int, largest: int) -> Iterator[tuple[str, bytes]]:
    """Name and content of the plain files of a tar archive, compressed or not, in order.

    Links and devices are passed over, and no name is ever used as a path. ValueError where the archive is
    damaged, is longer than ``most`` bytes once decompressed, or holds a file longer than ``largest``.
    """
    content = io.BytesIO(read_content(path, most))
    with damaged(path, "a tar archive"), tarfile.open(fileobj=content, mode="r:") as archive:
        for member in archive:
            if not member.isreg():
                continue
            name = f"{path}: {member.name}"
            if not 0 <= member.size <= largest:
                raise ValueError(f"{name} has {member.size} bytes, expected at most {largest}")
            file = archive.extractfile(member)
            held = b"" if file is None else file.read()
            if len(held) != member.size:
                raise ValueError(f"{name} has {len(held)} bytes, expected {member.size}")
            yield member.name, held

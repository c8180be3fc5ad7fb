"""Data files: found in the user's folder or the cache, or downloaded into the cache; read and checked."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from implicit_attn.optional import require

DATA_VARIABLE = "IMPLICIT_ATTN_DATA"
LARGEST = 2**30  # bytes of a file after decompression
KINDS: dict[bytes, Any] = {
    b"\xfd7": lzma.LZMAFile,
    b"\x1f\x8b": partial(gzip.GzipFile, None, "rb", 9),
}


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/implicit-attn``, or ``~/.cache/implicit-attn``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "implicit-attn"


def search_folders() -> list[Path]:
    """Return the folders to search: ``$IMPLICIT_ATTN_DATA`` if it is set, then the cache."""
    named = os.environ.get(DATA_VARIABLE)
    if named and not Path(named).is_dir():
        raise NotADirectoryError(f"{DATA_VARIABLE} is {named!r}, expected an existing folder")
    return [*([Path(named)] if named else []), cache_folder()]


def find(folder: str, *names: str) -> Path | None:
    """Return the first of the files ``folder/name`` in the search folders, or None."""
    places = (base / folder / name for base in search_folders() for name in names)
    return next((place for place in places if place.is_file()), None)


def missing(path: str) -> FileNotFoundError:
    """Return the error for a file ``FOLDER/NAME`` that is in no search folder."""
    places = ", ".join(map(str, search_folders()))
    return FileNotFoundError(f"{path} is not in {places}; set {DATA_VARIABLE} to a folder with it")


def download(folder: str, name: str, urls: Sequence[str], md5: str) -> Path:
    """Download ``folder/name`` into the cache with pooch, from the first URL that works."""
    error, causes = missing(f"{folder}/{name}"), []
    try:
        pooch = require("pooch", extra="examples")
    except ImportError as cause:
        raise ImportError(f"{error}, or download it: {cause}") from cause
    for url in urls:
        try:
            cache = cache_folder() / folder
            return Path(pooch.retrieve(url, known_hash=f"md5:{md5}", fname=name, path=cache))
        except (OSError, ValueError) as cause:  # no connection, or another checksum
            causes.append(f"{url}: {type(cause).__name__}: {cause}")
    raise FileNotFoundError(f"{error}. The download failed: {'; '.join(causes)}")


@contextmanager
def damaged(path: str | Path, expected: str) -> Iterator[None]:
    """Turn any error of a decoder within the block into a ``ValueError`` that names the file."""
    try:
        yield
    except (FileNotFoundError, PermissionError, ImportError):
        raise
    except Exception as error:  # a decoder raises many kinds of errors on a file of another format
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{path}: damaged, expected {expected}: {kind}{error}") from error


def read_content(path: Path, md5: str | None = None) -> bytes:
    """Return the bytes of a file, decompressed if they are gzip or xz.

    Raises:
        ValueError: the file is damaged or too long, or its decompressed content has another md5.
    """
    with path.open("rb") as file, damaged(path, "a whole file"):
        kind = KINDS.get(file.read(2))
        file.seek(0)
        content = (kind(file) if kind else file).read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"it has over {LARGEST} bytes")
        digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if md5 not in (None, digest):
            raise ValueError(f"its content has the md5 {digest}, expected {md5}; replace the file")
    return content

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
LARGEST = 2**30  # bytes of a file, once decompressed


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/implicit-attn``, or ``~/.cache/implicit-attn``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "implicit-attn"


def search_folders() -> list[Path]:
    """The folders searched, in order: ``$IMPLICIT_ATTN_DATA`` where it is set, then the cache."""
    named = os.environ.get(DATA_VARIABLE)
    if named and not Path(named).is_dir():
        raise NotADirectoryError(f"{DATA_VARIABLE} is {named!r}, expected an existing folder")
    return [*([Path(named)] if named else []), cache_folder()]


def find(folder: str, *names: str) -> Path | None:
    """The first of the files ``folder/name`` in the folders searched; None where there is none."""
    places = (base / folder / name for base in search_folders() for name in names)
    return next((place for place in places if place.is_file()), None)


def missing(path: str) -> FileNotFoundError:
    """The error for a file ``FOLDER/NAME`` that is in none of the folders searched."""
    places = ", ".join(map(str, search_folders()))
    return FileNotFoundError(f"{path} is not in {places}; set {DATA_VARIABLE} to a folder with it")


def download(folder: str, name: str, urls: Sequence[str], md5: str) -> Path:
    """``folder/name`` in the cache, downloaded by pooch from the first URL that has it."""
    error = missing(f"{folder}/{name}")
    try:
        pooch = require("pooch", extra="examples")
    except ImportError as cause:
        raise ImportError(f"{error}, or download it: {cause}") from cause
    causes = []
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
    except Exception as error:  # decoders raise many kinds on a file that is not theirs
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{path}: damaged, expected {expected}: {kind}{error}") from error


def read_content(path: Path, md5: str | None = None) -> bytes:
    """The bytes of a file, decompressed if it is gzip or xz, whatever its name says.

    Raises:
        ValueError: the file is damaged or too long, or its decompressed content has another md5.
    """
    with path.open("rb") as file, damaged(path, "a whole file"):
        start = file.read(2)
        file.seek(0)
        kinds = {b"\xfd7": lzma.LZMAFile, b"\x1f\x8b": partial(gzip.GzipFile, None, "rb", 9)}
        kind: Any = kinds.get(start)
        content = (file if kind is None else kind(file)).read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"it has over {LARGEST} bytes")
        digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if md5 is not None and digest != md5:
            raise ValueError(f"its content has the md5 {digest}, expected {md5}; replace the file")
    return content

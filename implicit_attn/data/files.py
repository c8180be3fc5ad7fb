"""Data files: found in the user's folder or the cache, read, and refused where they are damaged."""

from __future__ import annotations

import gzip
import lzma
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

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


def read_content(path: Path) -> bytes:
    """Return the bytes of a file, decompressed if they are gzip or xz; ValueError if it is damaged."""
    with path.open("rb") as file, damaged(path, "a whole file"):
        kind = KINDS.get(file.read(2))
        file.seek(0)
        content = (kind(file) if kind else file).read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"it has over {LARGEST} bytes")
    return content

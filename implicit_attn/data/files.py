"""Data files: found in the user's folder or the cache, or downloaded; checked by md5.

How they are unpacked within bounds is in ``implicit_attn/data/unpacking.py``.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from implicit_attn.data.unpacking import damaged, read_all, unpacked
from implicit_attn.optional import require

DATA_VARIABLE = "IMPLICIT_ATTN_DATA"
_LOG = logging.getLogger(__name__)
MOST_BYTES = 2**30  # of a file, once decompressed


@dataclass(frozen=True)
class RemoteFile:
    """A file that is distributed gzipped.

    A file that was compressed again is as good as the original: local ones are judged by content.
    """

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
        path = download(file.folder, file.name, file.archive, urls, file.archive_md5)
    content = read_content(path, file.most)
    check_md5(content, file.content_md5, f"{path}, decompressed")
    return content


def read_content(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file, decompressed if it is gzipped, whatever its name says.

    Raises:
        ValueError: the file is damaged, or has more than ``most`` bytes; no more are unpacked.
    """
    with path.open("rb") as file, damaged(path, "a file that is whole"):
        return read_all(unpacked(file), most, str(path))


def check_md5(content: bytes, expected: str, source: str) -> None:
    """Raise a ``ValueError`` that names ``source`` where the md5 of ``content`` is another one."""
    check_digest(hashlib.md5(content, usedforsecurity=False).hexdigest(), expected, source)


def check_digest(digest: str, expected: str, source: str) -> None:
    """As :func:`check_md5`, with the md5 computed already."""
    if digest != expected:
        raise ValueError(f"{source}: md5 {digest}, expected {expected}; delete or replace the file")


def digest_of(path: Path) -> str:
    """md5 of a file, read in pieces."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def download(folder: str, name: str, archive: str, urls: Sequence[str], md5: str) -> Path:
    """``folder/archive`` in the cache, from the first URL that gives it.

    ``name`` is what else would have done, for the message.
    """
    places = ", ".join(str(base / folder) for base in search_folders())
    help_text = (
        f"{folder}/{name} (or {archive}) is not in {places}. To provide it, set {DATA_VARIABLE} to "
        f"a folder that contains {folder}/{archive}"
    )
    try:
        pooch = require("pooch", extra="examples")
    except ImportError as error:
        raise ImportError(f"{help_text}; to download it: {error}") from error
    cache, causes = cache_folder() / folder, list[Exception]()
    for url in urls:
        _LOG.info("downloading %s to %s", url, cache)
        try:
            return Path(pooch.retrieve(url, known_hash=f"md5:{md5}", fname=archive, path=cache))
        # requests' errors are OSErrors; pooch raises ValueError for a wrong checksum.
        except (OSError, ValueError) as error:
            causes.append(error)
            response = getattr(error, "response", None)
            if response is not None:
                response.close()  # pooch leaves the connection of a refused request open
    tried = "; ".join(
        f"{url}: {type(cause).__name__}: {cause}" for url, cause in zip(urls, causes, strict=True)
    )
    raise FileNotFoundError(f"{help_text}. The download failed: {tried}") from causes[-1]

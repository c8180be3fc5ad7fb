"""Where data files come from: the user's folder, the cache, a mirror; their content is checked."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from implicit_attn.data.idx import read_content
from implicit_attn.optional import require

DATA_VARIABLE = "IMPLICIT_ATTN_DATA"


@dataclass(frozen=True)
class RemoteFile:
    """A file that is distributed gzipped.

    Attributes:
        folder: its folder inside the user's data folder and inside the cache.
        name: its name once decompressed.
        archive_md5: of the distributed ``name + ".gz"``, checked after a download.
        content_md5: of the decompressed file, checked at every reading. A file that was compressed
            again is as good as the original, so local archives are judged by their content.
        mirrors: URLs of folders, each ending in "/", tried in order.
    """

    folder: str
    name: str
    archive_md5: str
    content_md5: str
    mirrors: tuple[str, ...]

    @property
    def archive(self) -> str:
        return f"{self.name}.gz"


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/implicit-attn``, or ``~/.cache/implicit-attn``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "implicit-attn"


def search_folders() -> list[Path]:
    """The folders searched, in order: ``$IMPLICIT_ATTN_DATA`` where it is set, then the cache.

    Raises:
        NotADirectoryError: the variable is set to something that is not a folder.
    """
    named = os.environ.get(DATA_VARIABLE)
    if not named:
        return [cache_folder()]
    if not Path(named).is_dir():
        raise NotADirectoryError(f"{DATA_VARIABLE} is {named!r}, expected an existing folder")
    return [Path(named), cache_folder()]


def fetch(file: RemoteFile) -> bytes:
    """The decompressed content of a file: found in a local folder, or downloaded into the cache.

    Raises:
        FileNotFoundError: it is in no local folder, and no mirror gave it.
        ImportError: it is in no local folder, and pooch, which would download it, is not installed.
        NotADirectoryError: ``IMPLICIT_ATTN_DATA`` is not a folder.
        ValueError: the file that was found is corrupt or is another one.
    """
    folders = [folder / file.folder for folder in search_folders()]
    for folder in folders:
        for name in (file.name, file.archive):
            if (folder / name).is_file():
                return _checked_content(file, folder / name)
    return _checked_content(file, _download(file, folders))


def _checked_content(file: RemoteFile, path: Path) -> bytes:
    content = read_content(path)
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != file.content_md5:
        raise ValueError(
            f"{path}: the decompressed content has md5 {digest}, expected {file.content_md5}; "
            "delete or replace the file"
        )
    return content


def _download(file: RemoteFile, searched: list[Path]) -> Path:
    places = ", ".join(str(folder) for folder in searched)
    help_text = (
        f"{file.folder}/{file.name} (or {file.archive}) is not in {places}. To provide it, set "
        f"{DATA_VARIABLE} to a folder that contains {file.folder}/{file.archive}"
    )
    try:
        pooch = require("pooch", extra="examples")
    except ImportError as error:
        raise ImportError(f"{help_text}; to download it: {error}") from error
    causes: list[Exception] = []
    for mirror in file.mirrors:
        try:
            return Path(
                pooch.retrieve(
                    mirror + file.archive,
                    known_hash=f"md5:{file.archive_md5}",
                    fname=file.archive,
                    path=cache_folder() / file.folder,
                )
            )
        # requests' errors are OSErrors; pooch raises ValueError for a wrong checksum.
        except (OSError, ValueError) as error:
            causes.append(error)
            response = getattr(error, "response", None)
            if response is not None:
                response.close()  # pooch leaves the connection of a refused request open
    tried = "; ".join(
        f"{mirror}{file.archive}: {type(cause).__name__}: {cause}"
        for mirror, cause in zip(file.mirrors, causes, strict=True)
    )
    raise FileNotFoundError(f"{help_text}. The download failed: {tried}") from causes[-1]

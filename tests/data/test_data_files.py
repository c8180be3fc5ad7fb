"""Finding, checking and downloading data files; the mirror is a server on this machine."""

from __future__ import annotations

import gzip
import hashlib
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pooch
import pytest

from implicit_attn.data.files import RemoteFile, cache_folder, fetch, search_folders

CONTENT = b"what the file holds"
ARCHIVE = gzip.compress(CONTENT, mtime=0)
# The same content, compressed otherwise: another checksum of the archive.
OTHER_ARCHIVE = gzip.compress(CONTENT, compresslevel=0, mtime=1)


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def remote_file(*mirrors: str) -> RemoteFile:
    return RemoteFile("toys", "train", md5(ARCHIVE), md5(CONTENT), mirrors)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """An empty user's folder and an empty cache."""
    named, cache = tmp_path / "named", tmp_path / "cache"
    (named / "toys").mkdir(parents=True)
    (cache / "implicit-attn" / "toys").mkdir(parents=True)
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(named))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return named / "toys", cache / "implicit-attn" / "toys"


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **options: object) -> str:
        raise ConnectionError("no route to the mirror")

    monkeypatch.setattr(pooch, "retrieve", offline)


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder and the URL that it is served at."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "mirror"
    folder.mkdir()
    handler = partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("no_download")
@pytest.mark.parametrize("place", [0, 1], ids=["named", "cache"])
@pytest.mark.parametrize(
    ("name", "content"),
    [("train", CONTENT), ("train.gz", ARCHIVE), ("train.gz", OTHER_ARCHIVE)],
    ids=["plain", "archive", "compressed again"],
)
def test_a_local_file_is_used(
    folders: tuple[Path, Path], place: int, name: str, content: bytes
) -> None:
    (folders[place] / name).write_bytes(content)
    assert fetch(remote_file()) == CONTENT


@pytest.mark.usefixtures("no_download")
def test_the_named_folder_comes_before_the_cache(folders: tuple[Path, Path]) -> None:
    (folders[0] / "train").write_bytes(CONTENT)
    (folders[1] / "train").write_bytes(b"another file")
    assert fetch(remote_file()) == CONTENT


@pytest.mark.usefixtures("no_download")
def test_a_wrong_local_file_is_refused_and_not_replaced(folders: tuple[Path, Path]) -> None:
    (folders[0] / "train.gz").write_bytes(gzip.compress(b"another file"))
    (folders[1] / "train").write_bytes(CONTENT)
    with pytest.raises(ValueError, match=rf"md5 {md5(b'another file')}, expected {md5(CONTENT)}"):
        fetch(remote_file())


@pytest.mark.usefixtures("no_download")
def test_a_truncated_archive_is_refused(folders: tuple[Path, Path]) -> None:
    (folders[0] / "train.gz").write_bytes(ARCHIVE[:-6])
    with pytest.raises(ValueError, match=r"train\.gz: damaged or another file"):
        fetch(remote_file())


@pytest.mark.usefixtures("no_download")
def test_offline_the_error_says_what_where_how_and_why(folders: tuple[Path, Path]) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        fetch(remote_file("https://first.invalid/", "https://second.invalid/"))
    message = str(caught.value)
    for part in (
        "toys/train (or train.gz)",
        *map(str, folders),
        "set IMPLICIT_ATTN_DATA",
        "https://first.invalid/train.gz: ConnectionError: no route to the mirror",
        "https://second.invalid/train.gz: ConnectionError: no route to the mirror",
    ):
        assert part in message
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_without_pooch_the_error_still_says_how_to_provide_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"IMPLICIT_ATTN_DATA.*implicit-attn\[examples\]"):
        fetch(remote_file("https://first.invalid/"))


def test_a_download_lands_in_the_cache_and_is_used_again(
    folders: tuple[Path, Path], mirror: tuple[Path, str]
) -> None:
    folder, url = mirror
    (folder / "train.gz").write_bytes(ARCHIVE)
    assert fetch(remote_file(url)) == CONTENT
    assert (folders[1] / "train.gz").read_bytes() == ARCHIVE
    assert not list(folders[0].iterdir())
    (folder / "train.gz").unlink()
    assert fetch(remote_file(url)) == CONTENT


def test_the_next_mirror_is_tried(mirror: tuple[Path, str]) -> None:
    folder, url = mirror
    (folder / "train.gz").write_bytes(ARCHIVE)
    assert fetch(remote_file(f"{url}nothing-here/", url)) == CONTENT


def test_a_download_with_a_wrong_checksum_is_refused(
    folders: tuple[Path, Path], mirror: tuple[Path, str]
) -> None:
    folder, url = mirror
    (folder / "train.gz").write_bytes(gzip.compress(b"another file"))
    with pytest.raises(FileNotFoundError, match=rf"{url}train\.gz: ValueError.*{md5(ARCHIVE)}"):
        fetch(remote_file(url))
    assert not list(folders[1].iterdir())


def test_without_the_variable_only_the_cache_is_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv("IMPLICIT_ATTN_DATA")
        else:
            monkeypatch.setenv("IMPLICIT_ATTN_DATA", value)
        assert search_folders() == [tmp_path / "cache" / "implicit-attn"]


def test_the_cache_is_under_home_by_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / ".cache" / "implicit-attn"


def test_a_variable_that_names_no_folder_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path / "typo"))
    with pytest.raises(NotADirectoryError, match=r"IMPLICIT_ATTN_DATA is '.*typo'"):
        fetch(remote_file())

"""Files found, downloaded and checked; the IDX format; digits and both MNIST sets."""

from __future__ import annotations

import gzip
import hashlib
import struct
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pooch
import pytest
import torch
from sklearn import datasets

from implicit_attn.data import image_sets as mnist
from implicit_attn.data import load, load_digits, load_fashion_mnist, load_mnist, read_idx
from implicit_attn.data.files import RemoteFile, cache_folder, fetch, find, search_folders
from implicit_attn.data.image_sets import parse_idx

CONTENT = b"what the file holds"
ARCHIVE = gzip.compress(CONTENT, mtime=0)
OTHER_ARCHIVE = gzip.compress(CONTENT, compresslevel=0, mtime=1)  # of another checksum
LOCAL = {
    files[0].folder: all(find(each.folder, each.name, each.archive) for each in files)
    for files in (mnist.MNIST_FILES, mnist.FASHION_MNIST_FILES)
}


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def remote_file(*mirrors: str) -> RemoteFile:
    return RemoteFile("toys", "train", md5(ARCHIVE), md5(CONTENT), mirrors)


@pytest.fixture
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
def test_a_local_file_is_used(folders: tuple[Path, Path], place: int) -> None:
    for name, content in (("train.gz", ARCHIVE), ("train.gz", OTHER_ARCHIVE), ("train", CONTENT)):
        (folders[place] / name).write_bytes(content)
        assert fetch(remote_file()) == CONTENT
    (folders[1] / "train").write_bytes(b"another file")
    if place == 0:
        assert fetch(remote_file()) == CONTENT  # the named folder comes first
    else:
        with pytest.raises(ValueError, match=rf"md5 .*, expected {md5(CONTENT)}"):
            fetch(remote_file())
        assert (folders[1] / "train").read_bytes() == b"another file"


@pytest.mark.usefixtures("no_download")
def test_offline_the_error_says_what_where_how_and_why(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        fetch(remote_file("https://first.invalid/", "https://second.invalid/"))
    for part in (
        "toys/train.gz is not in",
        *(str(folder.parent) for folder in folders),
        "set IMPLICIT_ATTN_DATA",
        "https://first.invalid/train.gz: ConnectionError: no route to the mirror",
        "https://second.invalid/train.gz: ConnectionError: no route to the mirror",
    ):
        assert part in str(caught.value)
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"(?s)IMPLICIT_ATTN_DATA.*\[examples\]"):
        fetch(remote_file("https://first.invalid/"))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"\[examples\]"):
        load_digits()


def test_a_download_lands_in_the_cache_and_is_used_again(
    folders: tuple[Path, Path], mirror: tuple[Path, str]
) -> None:
    folder, url = mirror
    (folder / "train.gz").write_bytes(gzip.compress(b"another file"))
    with pytest.raises(FileNotFoundError, match=rf"{url}train\.gz: ValueError.*{md5(ARCHIVE)}"):
        fetch(remote_file(url))
    assert not list(folders[1].iterdir())
    (folder / "train.gz").write_bytes(ARCHIVE)
    assert fetch(remote_file(f"{url}nothing-here/", url)) == CONTENT  # the next mirror is tried
    assert (folders[1] / "train.gz").read_bytes() == ARCHIVE and not list(folders[0].iterdir())
    (folder / "train.gz").unlink()
    assert fetch(remote_file(url)) == CONTENT


def test_the_folders_that_are_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "implicit-attn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", "")
    assert search_folders() == [tmp_path / "cache" / "implicit-attn"]
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path / "typo"))
    with pytest.raises(NotADirectoryError, match=r"IMPLICIT_ATTN_DATA is '.*typo'"):
        search_folders()


def idx_bytes(shape: tuple[int, ...], values: list[int]) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(values)


WHOLE = idx_bytes((2, 3), [1, 2, 3, 4, 5, 6])


def test_arrays_of_every_shape(tmp_path: Path) -> None:
    values = [0, 1, 127, 128, 254, 255]
    for number, shape in enumerate([(6,), (2, 3), (3, 1, 2), (1, 2, 3, 1)]):
        content = idx_bytes(shape, values)
        path = tmp_path / str(number)
        path.write_bytes(gzip.compress(content) if number % 2 else content)
        array = read_idx(path)
        assert array.shape == shape
        assert torch.equal(array.flatten(), torch.tensor(values, dtype=torch.uint8))
    assert parse_idx(idx_bytes((0, 4), []), source="").shape == (0, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "magic number is ''"),
        (WHOLE[:3], "magic number is '00 00 08'"),
        (b"\x01" + WHOLE[1:], "magic number is '01 00 08 02'"),
        (b"\x00\x00\x0b\x02" + WHOLE[4:], "magic number is '00 00 0b 02'"),
        (b"\x00\x00\x08\x00" + WHOLE[4:], "number of dimensions >= 1"),
        (b"\x89PNG" + WHOLE[4:], "magic number is '89 50 4e 47'"),
        (WHOLE[:11], "11 bytes, expected 12 of header"),
        (WHOLE[:-1], "17 bytes, expected 18 for shape"),
        (WHOLE + b"\x00", "19 bytes, expected 18 for shape"),
        (struct.pack(">HBB4I", 0, 8, 4, *[2**32 - 1] * 4), "20 bytes, expected 34"),
    ],
)
def test_what_is_wrong_with_an_idx_file_is_named(
    tmp_path: Path, content: bytes, message: str
) -> None:
    for packed in (content, gzip.compress(content)):
        path = tmp_path / "broken-file"
        path.write_bytes(packed)
        with pytest.raises(ValueError, match=f"broken-file: .*{message}"):
            read_idx(path)


def test_the_digits_are_scikit_learns() -> None:
    data, again, other = load("digits"), load_digits(), load_digits(holdout=0.5, seed=1)
    assert (data.name, data.classes) == ("digits", 10)
    assert torch.equal(data.test_images, again.test_images)
    assert not torch.equal(data.test_images[:300], other.test_images[:300])
    pixels, labels = (torch.tensor(each) for each in datasets.load_digits(return_X_y=True))
    theirs = sorted(torch.cat([pixels, labels[:, None]], 1).tolist())
    every = labels.bincount().tolist()
    for found, share in ((data, 0.2), (other, 0.5)):
        assert found.test_labels.bincount().tolist() == [round(share * n) for n in every]
        images = torch.cat([found.train_images, found.test_images]).flatten(1) * 16
        own = torch.cat([found.train_labels, found.test_labels])
        assert sorted(torch.cat([images, own[:, None]], 1).tolist()) == theirs
    with pytest.raises(ValueError, match=r"holdout must lie .* got 1\.0"):
        load_digits(holdout=1.0)
    with pytest.raises(ValueError, match=r"'MNIST'.*'digits', 'mnist', 'fashion-mnist'"):
        load("MNIST")


def test_one_class_is_not_enough() -> None:
    """``--limit 1`` ended in a traceback of scikit-learn."""
    data = load_digits()
    assert len(data.first(2).train_labels) == 2
    with pytest.raises(ValueError, match=r"limit must leave .* two classes at least, got 1"):
        data.first(1)


@pytest.mark.parametrize("name", LOCAL)
def test_the_real_files(name: str) -> None:
    if not LOCAL[name]:
        pytest.skip(f"{name} is not in the data folders (IMPLICIT_ATTN_DATA)")
    data = load(name)
    assert data.train_images.shape == (60_000, 1, 28, 28) and data.train_images.max() == 1
    assert data.test_images.shape == (10_000, 1, 28, 28)
    counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert data.test_labels.bincount().tolist() == (counts if name == "mnist" else 10 * [1000])


def test_each_mnist_file_goes_to_its_place(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four small files in the place of both sets', with checksums that fit them."""
    generator = torch.Generator().manual_seed(0)
    sizes = [((6, 28, 28), 256), ((6,), 10), ((4, 28, 28), 256), ((4,), 10)]
    arrays = [torch.randint(high, size, generator=generator) for size, high in sizes]
    monkeypatch.setattr(mnist, "_SHAPES", tuple(size for size, _ in sizes))
    for constant, read in (
        ("MNIST_FILES", load_mnist),
        ("FASHION_MNIST_FILES", load_fashion_mnist),
    ):
        files = []
        for file, array in zip(getattr(mnist, constant), arrays, strict=True):
            content = idx_bytes(tuple(array.shape), array.flatten().tolist())
            path = folders[0].parent / file.folder / file.name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            files.append(RemoteFile(file.folder, file.name, "", md5(content), ()))
        monkeypatch.setattr(mnist, constant, tuple(files))
        data = read()
        assert torch.equal((data.train_images * 255).round().long().squeeze(1), arrays[0])
        assert torch.equal(data.train_labels, arrays[1])
        assert torch.equal((data.test_images * 255).round().long().squeeze(1), arrays[2])
        assert torch.equal(data.test_labels, arrays[3])
    monkeypatch.setattr(mnist, "_SHAPES", ((6, 28, 28), (6,), (5, 28, 28), (5,)))
    with pytest.raises(ValueError, match=r"mnist/t10k-images-idx3-ubyte: .*\(4, 28, 28\).*\(5,"):
        load_mnist()

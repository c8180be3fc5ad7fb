"""Images: files found and checked, digits, MNIST, CIFAR-10; ImageData, patches, augmentations."""

from __future__ import annotations

import gzip
import hashlib
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pooch
import pytest
import torch
from sklearn import datasets
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.data import (
    Compose,
    ImageData,
    RandomAffine,
    RandomCrop,
    RandomFlip,
    epoch_generator,
    load,
    load_digits,
    read_idx,
)
from implicit_attn.data import images as image_sets
from implicit_attn.data.files import RemoteFile, cache_folder, fetch, find, search_folders
from implicit_attn.data.images import (
    hidden_patches,
    hide_patches,
    join_patches,
    parse_idx,
    split_patches,
)

# Files found, downloaded and checked; the IDX format; digits and both MNIST sets.


CONTENT = b"what the file holds"
ARCHIVE = gzip.compress(CONTENT, mtime=0)
OTHER_ARCHIVE = gzip.compress(CONTENT, compresslevel=0, mtime=1)  # of another checksum
LOCAL = {
    files[0].folder: all(find(each.folder, each.name, each.archive) for each in files)
    for files in (image_sets.MNIST_FILES, image_sets.FASHION_MNIST_FILES)
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


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder and the URL that it is served at."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "mirror"
    folder.mkdir()
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
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
    values, path = [0, 1, 127, 128, 254, 255], tmp_path / "array"
    for pack, shape in ((bytes, (6,)), (gzip.compress, (2, 3)), (bytes, (1, 2, 3, 1))):
        path.write_bytes(pack(idx_bytes(shape, values)))
        expected = torch.tensor(values, dtype=torch.uint8).view(shape)
        assert torch.equal(read_idx(path), expected)
    assert parse_idx(idx_bytes((0, 4), []), source="").shape == (0, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (WHOLE[:3], "magic number is '00 00 08'"),
        (b"\x00\x00\x0b\x02" + WHOLE[4:], "magic number is '00 00 0b 02'"),
        (b"\x00\x00\x08\x00" + WHOLE[4:], "number of dimensions >= 1"),
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


@pytest.mark.parametrize("name", LOCAL)
def test_the_real_files(name: str) -> None:
    if not LOCAL[name]:
        pytest.skip(f"{name} is not in the data folders (IMPLICIT_ATTN_DATA)")
    data = load(name)
    assert data.train_images.shape == (60_000, 1, 28, 28) and data.train_images.max() == 1
    assert data.test_images.shape == (10_000, 1, 28, 28)
    counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert data.test_labels.bincount().tolist() == (counts if name == "mnist" else 10 * [1000])


# ImageData's checks, and the generators of epochs and batches.


def image_data(**changes: Any) -> ImageData:
    parts: dict[str, Any] = {
        "name": "toy",
        "classes": 3,
        "train_images": torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(0)),
        "train_labels": torch.tensor([0, 1, 2, 0]),
        "test_images": torch.zeros(2, 1, 2, 2),
        "test_labels": torch.tensor([2, 1]),
    }
    return ImageData(**(parts | changes))


def test_some_of_the_images_are_the_first_or_of_all_classes() -> None:
    data = image_data()
    assert torch.equal(data.first(2).train_images, data.train_images[:2])
    assert data.first(None) is data and len(data.first(9).train_labels) == 4
    labels = torch.arange(3).repeat_interleave(4)
    images = torch.rand(12, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    ordered = {"train_images": images, "train_labels": labels}
    ordered |= {"test_images": images, "test_labels": labels}
    by_class = image_data(**ordered)
    assert by_class.first(6).train_labels.tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="two classes at least, got 1"):
        by_class.first(1)
    some, own = by_class.some_test(5)
    assert own.tolist() == [0, 0, 1, 1, 2] and torch.equal(some, images[[0, 2, 4, 7, 9]])
    assert len(by_class.some_test(None)[1]) == 12


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (TypeError, {"train_images": torch.rand(4, 1, 2, 2).double()}, "train_images.*float64"),
        (TypeError, {"test_labels": torch.tensor([2, 1]).int()}, "test_labels.*torch.int32"),
        (ValueError, {"train_labels": torch.tensor([0, 1, 2])}, r"train_labels \(3,\)"),
        (ValueError, {"test_images": torch.zeros(2, 1, 3, 2)}, r"test_images is \(1, 3, 2\)"),
        (ValueError, {"test_images": torch.zeros(0, 1, 2, 2)}, r"test_images \(0, 1, 2, 2\)"),
        (ValueError, {"train_labels": torch.tensor([0, 1, 3, 0])}, r"train_labels lie in \[0, 3\]"),
        (ValueError, {"test_images": torch.full((2, 1, 2, 2), 255.0)}, r"lie in \[255.0, 255.0\]"),
        (ValueError, {"test_images": torch.full((2, 1, 2, 2), torch.nan)}, r"lie in \[nan, nan\]"),
    ],
)
def test_bad_data_are_named(
    error: type[Exception], changes: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(error, match=message):
        image_data(**changes)


def test_generators_of_batches_are_streams_of_their_own() -> None:
    keys = [(0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    draws = {key: torch.rand(4, generator=epoch_generator(*key)) for key in keys}
    assert len({tuple(drawn.tolist()) for drawn in draws.values()}) == len(keys)
    assert all(torch.rand(4, generator=epoch_generator(*k)).equal(v) for k, v in draws.items())
    for wrong, name in (((-1, 0), "seed"), ((0, -1), "epoch"), ((0, 0, -1), "batch")):
        with pytest.raises(ValueError, match=f"{name} must be >= 0, got -1"):
            epoch_generator(*wrong)


# Images as patches, and hidden patches.


def random_images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_a_patch_is_a_square_of_the_image() -> None:
    images = random_images(2, 3, 12, 12)
    patches = split_patches(images, 4)
    with pytest.raises(ValueError, match=r"patch must divide .* 8 x 6"):
        split_patches(torch.zeros(1, 1, 8, 6), 2)
    assert patches.shape == (2, 9, 48)
    for row in range(3):
        for column in range(3):
            part = images[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert torch.equal(patches[:, 3 * row + column], part.flatten(1))
    assert torch.equal(join_patches(patches, 4), images)


def test_what_is_hidden_is_found_again() -> None:
    images = random_images(5, 1, 8, 8)
    hidden = torch.rand(5, 16, generator=torch.Generator().manual_seed(1)) < 0.4
    shown = hide_patches(images, hidden, 2)
    assert torch.equal(hidden_patches(shown, 2), hidden)
    assert int(shown.isnan().sum()) == 4 * int(hidden.sum())
    assert torch.equal(shown[~shown.isnan()], images[~shown.isnan()])
    assert not images.isnan().any()  # they are left as they are
    images[0, 0, 0, 3] = torch.nan  # one pixel hides its patch
    assert hidden_patches(images, 2)[0].nonzero().tolist() == [[1]]


# Augmentations: known cases, bounds, repeatability; crops against a loop over images and places.


IMAGES = torch.rand(64, 2, 5, 6, generator=torch.Generator().manual_seed(0))
AUGMENTS: list[Any] = [
    RandomAffine(),
    RandomCrop(2),
    RandomFlip(),
    Compose(RandomCrop(1), RandomFlip()),
]
still = partial(RandomAffine, rotation=0, scale=0, shear=0, shift=0)


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(batch: int) -> Tensor:
    """In the middle, so that nothing leaves the image."""
    x = torch.zeros(batch, 2, 28, 28)
    x[:, :, 10:18, 12:16] = torch.rand(batch, 2, 8, 4, generator=drawn(1)) + 0.5
    return x


def centre(x: Tensor) -> Tensor:
    """Centre of mass in pixels, (B, 2): down, across."""
    mass, places = x.sum(1), torch.arange(28.0)
    sums = torch.stack([(mass.sum(2) * places).sum(1), (mass.sum(1) * places).sum(1)], 1)
    return sums / mass.sum((1, 2))[:, None]


def test_shifts_rotations_and_scales_keep_to_their_bounds() -> None:
    x = blobs(64)
    torch.testing.assert_close(still()(x, drawn()), x, rtol=0, atol=1e-5)
    moved = centre(still(shift=3)(x, drawn())) - centre(x)
    assert 2 < moved.abs().max() <= 3 + 1e-3
    assert moved.std(0).min() > 1  # uniform in [-3, 3]: 1.73; each image by its own
    x = torch.zeros(8, 1, 28, 28)
    x[:, :, 6:22, 13:15] = 1.0  # a bar through the middle of the image
    turned = still(rotation=30)(x, drawn())
    torch.testing.assert_close(centre(turned), centre(x), rtol=0, atol=0.05)
    torch.testing.assert_close(turned.sum((1, 2, 3)), x.sum((1, 2, 3)), rtol=0.02, atol=0)
    assert (turned - x).abs().amax() > 0.5
    x = blobs(64)
    ratio = (still(scale=0.2)(x, drawn()).sum((1, 2, 3)) / x.sum((1, 2, 3))).sqrt()
    assert 1 / 1.2 - 0.01 <= ratio.min() < 0.9 and 1.1 < ratio.max() <= 1 / 0.8 + 0.01


def test_a_crop_is_one_of_the_windows_and_all_occur() -> None:
    padded, found = F.pad(IMAGES, 4 * [1]), set[tuple[int, int]]()
    for image, after in zip(padded, RandomCrop(1)(IMAGES, drawn()), strict=True):
        places = [(top, left) for top in range(3) for left in range(3)]
        same = [p for p in places if image[:, p[0] : p[0] + 5, p[1] : p[1] + 6].equal(after)]
        assert len(same) == 1
        found.update(same)
    assert len(found) == 9 and torch.equal(RandomCrop(0)(IMAGES, drawn()), IMAGES)


def test_flips() -> None:
    flipped = RandomFlip()(IMAGES, drawn())
    mirrored, kept = ((flipped == each).all(3).all(2).all(1) for each in (IMAGES.flip(3), IMAGES))
    assert (mirrored ^ kept).all() and 16 <= int(mirrored.sum()) <= 48
    assert torch.equal(RandomFlip(1.0)(IMAGES, drawn()), IMAGES.flip(3))
    assert torch.equal(RandomFlip(0.0)(IMAGES, drawn()), IMAGES)


@pytest.mark.parametrize("augment", AUGMENTS, ids=lambda a: type(a).__name__)
def test_augmentations_repeat_leave_their_input_alone_and_take_images_alone(augment: Any) -> None:
    before = IMAGES.clone()
    first = augment(IMAGES, drawn(1))
    assert torch.equal(first, augment(IMAGES, drawn(1)))
    assert not torch.equal(first, augment(IMAGES, drawn(2)))
    assert torch.equal(IMAGES, before)
    assert first.shape == IMAGES.shape and first.dtype == IMAGES.dtype
    for wrong in (IMAGES[0], (IMAGES * 255).byte()):
        with pytest.raises(ValueError, match=r"images must be floating \(B, C, H, W\)"):
            augment(wrong, drawn())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomAffine(rotation=-1.0), "rotation must be finite and >= 0, got -1.0"),
        (lambda: RandomAffine(shift=float("nan")), "shift must be finite and >= 0, got nan"),
        (lambda: RandomAffine(scale=1.0), "scale must be < 1, got 1.0"),
        (lambda: RandomCrop(-1), "padding must be >= 0, got -1"),
        (lambda: RandomFlip(float("nan")), r"probability must lie in \[0, 1\]"),
    ],
)
def test_bad_bounds_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()

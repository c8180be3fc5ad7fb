"""MNIST and Fashion-MNIST: the real files where they are at hand, small stand-ins elsewhere."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pooch
import pytest
import torch

from implicit_attn.data import ImageData, load, load_fashion_mnist, load_mnist, mnist
from implicit_attn.data.files import RemoteFile, fetch, search_folders

MNIST_COUNTS = {
    "train": [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    "test": [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
}
FASHION_COUNTS = {"train": [6000] * 10, "test": [1000] * 10}
SETS = [
    pytest.param("mnist", mnist.MNIST_FILES, MNIST_COUNTS, id="mnist"),
    pytest.param("fashion-mnist", mnist.FASHION_MNIST_FILES, FASHION_COUNTS, id="fashion-mnist"),
]


def skip_unless_local(files: tuple[RemoteFile, ...]) -> None:
    for file in files:
        places = [folder / file.folder for folder in search_folders()]
        if not any((p / n).is_file() for p in places for n in (file.name, file.archive)):
            wanted = f"{file.folder}/{file.archive}"
            variable = os.environ.get("IMPLICIT_ATTN_DATA", "not set")
            pytest.skip(f"{wanted} is not at hand (IMPLICIT_ATTN_DATA is {variable})")


@pytest.mark.parametrize(("name", "files", "counts"), SETS)
def test_the_real_files(
    name: str, files: tuple[RemoteFile, ...], counts: dict[str, list[int]]
) -> None:
    skip_unless_local(files)
    for file in files:
        assert hashlib.md5(fetch(file)).hexdigest() == file.content_md5
    data = load(name)
    assert (data.name, data.classes) == (name, 10)
    assert data.train_images.shape == (60_000, 1, 28, 28)
    assert data.test_images.shape == (10_000, 1, 28, 28)
    assert data.train_labels.bincount().tolist() == counts["train"]
    assert data.test_labels.bincount().tolist() == counts["test"]
    assert data.train_images.max() == 1
    assert data.train_images.dtype == torch.float32


def idx_file(pixels: torch.Tensor) -> bytes:
    return struct.pack(f">HBB{pixels.dim()}I", 0, 8, pixels.dim(), *pixels.shape) + bytes(
        pixels.flatten().tolist()
    )


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Four small files in the place of both sets' files, with checksums that fit them."""
    generator = torch.Generator().manual_seed(0)
    sizes = [((6, 28, 28), 256), ((6,), 10), ((4, 28, 28), 256), ((4,), 10)]
    arrays = [torch.randint(high, size, generator=generator) for size, high in sizes]
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path))
    monkeypatch.setattr(mnist, "_SHAPES", tuple(size for size, _ in sizes))
    for constant in ("MNIST_FILES", "FASHION_MNIST_FILES"):
        files = []
        for file, array in zip(getattr(mnist, constant), arrays, strict=True):
            content = idx_file(array)
            (tmp_path / file.folder).mkdir(exist_ok=True)
            (tmp_path / file.folder / file.name).write_bytes(content)
            digest = hashlib.md5(content).hexdigest()
            files.append(RemoteFile(file.folder, file.name, "", digest, ()))
        monkeypatch.setattr(mnist, constant, tuple(files))
    return arrays


@pytest.mark.parametrize("loader", [load_mnist, load_fashion_mnist])
def test_each_file_goes_to_its_place(
    stand_ins: list[torch.Tensor], loader: Callable[[], ImageData]
) -> None:
    data = loader()
    assert torch.equal((data.train_images * 255).round().long().squeeze(1), stand_ins[0])
    assert torch.equal(data.train_labels, stand_ins[1])
    assert torch.equal((data.test_images * 255).round().long().squeeze(1), stand_ins[2])
    assert torch.equal(data.test_labels, stand_ins[3])
    assert data.train_images.shape == (6, 1, 28, 28)
    assert 0 <= data.train_images.min() <= data.train_images.max() <= 1


@pytest.mark.usefixtures("stand_ins")
def test_a_shape_that_is_not_the_sets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "_SHAPES", ((6, 28, 28), (6,), (5, 28, 28), (5,)))
    with pytest.raises(ValueError, match=r"mnist/t10k-images-idx3-ubyte: .*\(4, 28, 28\).*\(5,"):
        load_mnist()


@pytest.mark.parametrize(
    ("name", "file"), [("mnist", "mnist/train-images"), ("fashion-mnist", "fashion-mnist/train")]
)
def test_offline_and_without_local_files_the_first_file_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, file: str
) -> None:
    def offline(*args: object, **options: object) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr(pooch, "retrieve", offline)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("IMPLICIT_ATTN_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=rf"{file}.*IMPLICIT_ATTN_DATA.*offline"):
        load(name)


def test_checksums_and_mirrors_are_well_formed() -> None:
    files = mnist.MNIST_FILES + mnist.FASHION_MNIST_FILES
    checksums = [md5 for file in files for md5 in (file.archive_md5, file.content_md5)]
    assert all(len(md5) == 32 and int(md5, 16) >= 0 for md5 in checksums)
    assert len(set(checksums)) == 16
    assert all(url.startswith("http") and url.endswith("/") for f in files for url in f.mirrors)

"""Images: found, downloaded, read; damaged files of every kind are refused with one error."""

from __future__ import annotations

import gzip
import io
import lzma
import struct
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from implicit_attn.data import (
    ImageData,
    images,
    load,
    load_digits,
    load_text,
    read_list,
    some_samples,
    unique_puzzles,
)
from implicit_attn.data.files import search_folders
from implicit_attn.data.images import read_idx
from implicit_attn.models import build_model, load_model, save_model
from implicit_attn.models.images import hidden_patches, hide_patches, join_patches, split_patches


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder; the cache is below it, and empty."""
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def idx_bytes(shape: tuple[int, ...], values: bytes) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + values


def tar_bytes(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def jpeg_archive(labels: Any = range(10)) -> bytes:
    """An image of each class, each with its own shade of red, in both parts."""
    image = pytest.importorskip("PIL.Image")
    members = {}
    for part in ("train", "test"):
        for label in labels:
            file = io.BytesIO()
            image.new("RGB", (32, 32), (20 * label, 0, 0)).save(file, "JPEG", quality=95)
            members[f"{part}/{images.CLASSES[label]}/0001.jpg"] = file.getvalue()
    return lzma.compress(tar_bytes(members))


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(("pack", "shape"), [
    (bytes, (6,)), (gzip.compress, (2, 3)), (lzma.compress, (1, 2, 3, 1)),
])  # fmt: skip
def test_arrays_of_every_shape(pack: Callable[[bytes], bytes], shape: Any, tmp_path: Path) -> None:
    values, path = bytes([0, 1, 127, 128, 254, 255]), tmp_path / "array"
    path.write_bytes(pack(idx_bytes(shape, values)))
    assert torch.equal(read_idx(path), torch.tensor(list(values), dtype=torch.uint8).view(shape))


def test_an_archive_of_cifar_is_read(folder: Path) -> None:
    write(folder, f"cifar10/{images.JPEG}", jpeg_archive())
    data = load("cifar10")
    assert data.name == "CIFAR-10 (JPEG)" and data.test_images.shape == (10, 3, 32, 32)
    assert sorted(data.train_labels.tolist()) == list(range(10))
    shades = 255 * data.train_images[:, 0].mean((1, 2))
    torch.testing.assert_close(shades, 20.0 * data.train_labels, atol=3.0, rtol=0)


def model_bytes(path: Path) -> bytes:
    specification = {"kind": "spin-classifier", "dim": 2, "widths": [2, 2, 2], "hidden": 2}
    save_model(path / "m.safetensors", build_model(specification), {"model": specification})
    return (path / "m.safetensors").read_bytes()


def list_bytes(path: Path) -> bytes:
    puzzles, solutions = (each.numpy().astype("u1") for each in unique_puzzles(2, 0))
    np.savez(path / "list.npz", puzzle=puzzles, solution=solutions)
    return (path / "list.npz").read_bytes()


# What is written, and what reads it: the file is whole, cut, of another kind, or has flipped bytes.
READERS: dict[str, tuple[Callable[[Path], bytes], Callable[[Path], Any]]] = {
    "idx": (lambda _: idx_bytes((2, 3), bytes(6)), read_idx),
    "idx, gzip": (lambda _: gzip.compress(idx_bytes((2, 3), bytes(6))), read_idx),
    "text, xz": (lambda _: lzma.compress(b"The cat sat on the mat. " * 20), load_text),
    "list": (list_bytes, read_list),
    "weights": (model_bytes, load_model),
}


@pytest.mark.defect("C4")
@pytest.mark.parametrize("damage", ["cut", "half", "empty", "other", "flipped"])
@pytest.mark.parametrize("kind", READERS)
def test_damaged_files_are_refused(kind: str, damage: str, tmp_path: Path) -> None:
    """With a ValueError that names the file; where a flipped byte does no harm, the file is read."""
    write, read = READERS[kind]
    content, path = write(tmp_path), tmp_path / "damaged.txt"
    path.write_bytes(content)
    assert read(path) is not None
    flipped = bytearray(content)
    for place in range(0, min(24, len(flipped)), 2):
        flipped[place] ^= 0xFF
    cut = -1 if "weights" in kind or "idx" in kind else -30
    changed = {
        "cut": content[:cut], "half": content[: len(content) // 2], "empty": b"",
        "other": b"\xff\xfe\x00" * 100, "flipped": bytes(flipped),
    }  # fmt: skip
    path.write_bytes(changed[damage])
    with pytest.raises(ValueError, match=r"damaged\.txt"):
        read(path)


@pytest.mark.defect("C4")
def test_a_damaged_archive_is_named(folder: Path) -> None:
    whole = jpeg_archive(range(2))
    for content in (
        b"",
        whole[:-30],
        lzma.compress(b"none"),
        lzma.compress(tar_bytes({"a": b"b"})),
    ):
        write(folder, f"cifar10/{images.JPEG}", content)
        with pytest.raises(ValueError, match=r"cifar10\.tar\.xz: damaged"):
            load("cifar10")


@pytest.mark.defect("B5")
@pytest.mark.parametrize("wrong", [np.float64, object])
def test_only_integers_are_digits(wrong: Any, tmp_path: Path) -> None:
    boards = np.ones((2, 81))
    np.savez(tmp_path / "list.npz", puzzle=boards.astype(wrong), solution=boards.astype("u1"))
    with pytest.raises(ValueError, match=r"list\.npz"):
        read_list(tmp_path / "list.npz")


def test_idx_files_are_read_or_downloaded_by_torchvision(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ((4, 2, 2), (4,), (2, 2, 2), (2,))
    for name, shape in zip(images.IDX, shapes, strict=True):
        write(folder, f"mnist/{name}", idx_bytes(shape, bytes(int(np.prod(shape)))))
    data = load("mnist")
    assert data.train_images.shape == (4, 1, 2, 2) and data.test_labels.tolist() == [0, 0]

    def make(root: str, train: bool, download: bool) -> SimpleNamespace:
        assert root.startswith(str(folder / "cache")) and download
        pixels = np.full((4 if train else 2, 2, 2, 3), 255, np.uint8)
        return SimpleNamespace(data=pixels, targets=list(range(len(pixels))))

    datasets = SimpleNamespace(CIFAR10=make)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(datasets=datasets))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)
    data = load("cifar10")
    assert data.name == "cifar10" and data.train_labels.tolist() == [0, 1, 2, 3]
    assert torch.equal(data.test_images, torch.ones(2, 3, 2, 2))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)  # not installed
    with pytest.raises(
        FileNotFoundError, match=r"cifar10.tar.xz .*IMPLICIT_ATTN_DATA.*torchvision"
    ):
        load("cifar10")


def test_the_folders_that_are_searched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert search_folders() == [folder, folder / "cache" / "implicit-attn"]
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(folder / "none"))
    with pytest.raises(NotADirectoryError, match="IMPLICIT_ATTN_DATA"):
        search_folders()


def test_the_digits_are_scikit_learns() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    data, other = load("digits"), load_digits(holdout=0.5, seed=1)
    pixels, labels = (torch.tensor(each) for each in datasets.load_digits(return_X_y=True))
    theirs = sorted(torch.cat([pixels, labels[:, None]], 1).tolist())
    every = labels.bincount().tolist()
    for found, share in ((data, 0.2), (other, 0.5)):
        assert found.test_labels.bincount().tolist() == [round(share * n) for n in every]
        both = torch.cat([found.train_images, found.test_images]).flatten(1) * 16
        own = torch.cat([found.train_labels, found.test_labels])
        assert sorted(torch.cat([both, own[:, None]], 1).tolist()) == theirs
    with pytest.raises(ValueError, match="holdout"):
        load_digits(holdout=1.0)
    with pytest.raises(ValueError, match="name"):
        load("MNIST")


def image_data(**changes: Any) -> ImageData:
    parts: dict[str, Any] = {
        "name": "toy", "classes": 3, "train_images": torch.rand(4, 1, 2, 2),
        "train_labels": torch.tensor([0, 1, 2, 0]), "test_images": torch.zeros(2, 1, 2, 2),
        "test_labels": torch.tensor([2, 1]),
    }  # fmt: skip
    return ImageData(**(parts | changes))


@pytest.mark.parametrize("changes", [
    {"train_images": torch.rand(3, 1, 2, 2)}, {"train_images": torch.rand(4, 2, 2)},
    {"train_labels": torch.tensor([0, 1, 3, 0])}, {"test_images": torch.zeros(2, 1, 3, 3)},
])  # fmt: skip
def test_bad_data_are_refused(changes: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="toy: "):
        image_data(**changes)


def test_some_of_the_images_are_the_first_or_of_all_classes() -> None:
    data = image_data()
    assert torch.equal(data.first(2).train_images, data.train_images[:2])
    assert data.first(None) is data and len(data.first(9).train_labels) == 4
    labels = torch.arange(3).repeat_interleave(4)
    assert labels[some_samples(labels, 6)].tolist() == [0, 0, 1, 1, 2, 2]


def test_hidden_patches_are_found_again() -> None:
    pictures = torch.arange(2 * 36.0).view(2, 1, 6, 6)
    patches = split_patches(pictures, 2)
    assert patches[0, 4].tolist() == [14, 15, 20, 21]  # the middle of three rows and columns
    assert torch.equal(join_patches(patches, 2), pictures)
    hidden = torch.zeros(2, 9, dtype=torch.bool)
    hidden[0, 4] = hidden[1, [0, 8]] = True
    shown = hide_patches(pictures, hidden, 2)
    assert torch.equal(hidden_patches(shown, 2), hidden)
    assert torch.equal(shown[~shown.isnan()], pictures[~shown.isnan()])

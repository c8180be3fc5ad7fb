"""CIFAR-10 as binary records and as JPEG files: the real copy where it is at hand, small ones else."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from implicit_attn.data import image_sets as cifar
from implicit_attn.data import load, load_cifar10
from implicit_attn.data.files import search_folders
from implicit_attn.data.image_sets import CLASSES, decode_jpeg, parse_binary

SMALL = {"train": 5, "test": 2}  # images of a class; the binary version has five training files


@pytest.fixture(autouse=True)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder and an empty cache, but for the test of the real copy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    named = tmp_path / "data"
    (named / "cifar10").mkdir(parents=True)
    if "real" not in request.node.name:
        monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(named))
        monkeypatch.setattr(cifar, "COUNTS", SMALL)
    return named / "cifar10"


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def records(number: int, seed: int) -> np.ndarray:
    """Records of every class ``number`` times: a label, then pixels."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (10 * number, 3072), dtype=np.uint8)
    labels = np.tile(np.arange(10, dtype=np.uint8), number)[:, None]
    return np.concatenate([labels, pixels], axis=1)


def write_binary(path: Path, monkeypatch: pytest.MonkeyPatch, skip: str = "") -> list[np.ndarray]:
    parts = [records(1, seed) for seed in range(5)] + [records(2, 5)]
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    with tarfile.open(path, "w:gz") as archive:
        for name, part in zip(names, parts, strict=True):
            if name != skip:
                add(archive, f"cifar-10-batches-bin/{name}", part.tobytes())
    monkeypatch.setattr(cifar, "BINARY_MD5", hashlib.md5(path.read_bytes()).hexdigest())
    return parts


def write_jpeg(path: Path, leave_out: str = "", size: int = 32) -> None:
    """Each image of one colour, which says its class and number, so that JPEG keeps it."""
    image: Any = pytest.importorskip("PIL.Image", reason="needs the extra [examples]")
    with tarfile.open(path, "w:xz") as archive:
        for part, number in SMALL.items():
            for index, name in enumerate(CLASSES):
                for each in range(number):
                    content = io.BytesIO()
                    picture = image.new("RGB", (size, size), (20 * index, 40 * each, 100))
                    picture.save(content, "JPEG", quality=95)
                    if f"{part}/{name}/{each:04d}.jpg" != leave_out:
                        add(archive, f"{part}/{name}/{each:04d}.jpg", content.getvalue())


def test_binary_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jpeg(folder / cifar.JPEG)
    parts = write_binary(folder / cifar.BINARY, monkeypatch)
    data = load_cifar10()  # the original comes before the copy
    assert (data.name, data.classes) == ("cifar10", 10)
    train = np.concatenate(parts[:5])
    assert data.train_labels.tolist() == train[:, 0].tolist()
    pixels = torch.from_numpy(train[:, 1:].reshape(-1, 3, 32, 32))
    assert torch.equal((data.train_images * 255).round().byte(), pixels)
    assert data.test_images.shape == (20, 3, 32, 32)
    monkeypatch.setattr(cifar, "BINARY_MD5", "0" * 32)
    with pytest.raises(ValueError, match=f"{cifar.BINARY}: md5 .* expected 0000"):
        load_cifar10()


def test_jpeg_files(folder: Path) -> None:
    write_jpeg(folder / cifar.JPEG)
    data = load("cifar10")
    assert data.name == "CIFAR-10 (JPEG)"
    assert data.train_labels.tolist() == [index for index in range(10) for _ in range(5)]
    colours = (255 * data.train_images).mean((2, 3))
    expected = [[20 * index, 40 * each, 100] for index in range(10) for each in range(5)]
    assert (colours - torch.tensor(expected)).abs().max() < 3


def test_missing_parts_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_binary(folder / cifar.BINARY, monkeypatch, skip="data_batch_4.bin")
    with pytest.raises(ValueError, match=r"holds no cifar-10-batches-bin/data_batch_4\.bin"):
        load_cifar10()
    (folder / cifar.BINARY).unlink()
    write_jpeg(folder / cifar.JPEG, leave_out="test/dog/0001.jpg")
    with pytest.raises(ValueError, match=r"\[2, 2, 2, 2, 2, 1, .* test images, expected 2"):
        load_cifar10()
    write_jpeg(folder / cifar.JPEG, size=16)
    with pytest.raises(ValueError, match=r"airplane/0000\.jpg is \(16, 16, 3\)"):
        load_cifar10()


@pytest.mark.parametrize("length", [0, 3072, 3074])
def test_broken_records_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"here: {length} bytes, expected a multiple of 3073"):
        parse_binary(bytes(length), source="here")


def test_the_real_copy() -> None:
    """Its test images; reading the training images as well takes four times as long."""
    pytest.importorskip("PIL", reason="needs the extra [examples]")
    places = [folder / "cifar10" / cifar.JPEG for folder in search_folders()]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        pytest.skip(f"cifar10/{cifar.JPEG} is not at hand (IMPLICIT_ATTN_DATA)")
    images, labels = decode_jpeg(path, ["test"])["test"]
    assert images.shape == (10_000, 3, 32, 32) and images.dtype == torch.uint8
    assert labels.long().bincount().tolist() == 10 * [1000]
    # The mean colour of the test images of the original.
    mean = images.float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(mean, torch.tensor([0.4942, 0.4851, 0.4504]), atol=2e-3, rtol=0)
    # Classes are told apart by their colour: planes fly in the blue, deer stand in the green.
    colour = [images[labels == CLASSES.index(n)].float().mean((0, 2, 3)) for n in CLASSES]
    assert max(range(10), key=lambda index: colour[index][2].item()) == CLASSES.index("airplane")

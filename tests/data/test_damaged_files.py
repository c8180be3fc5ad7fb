"""Damaged and hostile files: every reader gives the right data or a ``ValueError`` with the name.

Small valid files are cut at many places, their bytes flipped by a seeded generator, and replaced by
files of other formats; then come files that are well-formed and ask for too much.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cases.deq import specification, write_weights
from implicit_attn.checkpoint import save_checkpoint
from implicit_attn.data import images as cifar
from implicit_attn.data import load_cifar10, read_idx, read_list, unique_puzzles
from implicit_attn.data.files import RemoteFile, fetch, find, read_members
from implicit_attn.models import build_model, load_model
from implicit_attn.studies import open_subject

safetensors: Any = pytest.importorskip("safetensors.torch", reason="needs the extra [examples]")
image: Any = pytest.importorskip("PIL.Image", reason="needs the extra [examples]")
REAL = find("cifar10", cifar.JPEG)
SMALL = {"train": 5, "test": 1}  # images of a class
Read = Callable[[], Any]

OTHERS = {
    "nothing": b"", "a byte": b"\0", "zeros": bytes(3000), "ones": 3000 * b"\xff",
    "text": b"a list of puzzles\n" * 50, "gzip": gzip.compress(bytes(100)),
    "xz": lzma.compress(bytes(100)), "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07builtin\x94.",
    "npy": b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (3,)}\n",
    "zip": b"PK\x05\x06" + bytes(18), "nested": b"[" * 5000,
    "huge header": struct.pack("<Q", 2**62) + b"{}",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data" / "cifar10").mkdir(parents=True)
    monkeypatch.setattr(cifar, "COUNTS", SMALL)
    return tmp_path / "data"


def npz_bytes(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def boards() -> dict[str, np.ndarray]:
    puzzles, solutions = unique_puzzles(2, seed=0)
    return {"puzzle": puzzles.numpy().astype("u1"), "solution": solutions.numpy().astype("u1")}


def tar_bytes(contents: dict[str, bytes], mode: Any) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def jpeg(size: tuple[int, int] = (32, 32), shade: int = 0) -> bytes:
    file = io.BytesIO()
    image.new("RGB", size, (shade, 100, 50)).save(file, "JPEG")
    return file.getvalue()


def photographs() -> dict[str, bytes]:
    return {
        f"{part}/{name}/{each}.jpg": jpeg(shade=20 * index + each)
        for part, number in SMALL.items()
        for index, name in enumerate(cifar.CLASSES)
        for each in range(number)
    }


def idx_bytes(code: int = 8, shape: tuple[int, ...] = (40, 3)) -> bytes:
    content = np.random.default_rng(0).integers(0, 256, 120, dtype=np.uint8).tobytes()
    return struct.pack(f">HBB{len(shape)}I", 0, code, len(shape), *shape) + content


def prepare(kind: str, folder: Path) -> tuple[Path, Read]:
    """A valid file and what reads it."""
    if kind == "idx":
        path = folder / "array.gz"
        path.write_bytes(gzip.compress(idx_bytes()))
        return path, lambda: read_idx(path)
    if kind == "fetched":
        path, content = folder / "toys" / "train.gz", idx_bytes()
        path.parent.mkdir()
        path.write_bytes(gzip.compress(content))
        digest = hashlib.md5(content).hexdigest()
        return path, lambda: fetch(RemoteFile("toys", "train", "", digest, ()))
    if kind == "list":
        path = folder / "list.npz"
        path.write_bytes(npz_bytes(**boards()))
        return path, lambda: read_list(path)
    if kind == "photographs":
        path = folder / "cifar10" / cifar.JPEG
        path.write_bytes(tar_bytes(photographs(), "w:xz"))
        return path, lambda: decoded(load_cifar10())
    if kind == "records":
        path = folder / "cifar10" / cifar.BINARY
        content = b"".join(bytes([label]) + 3072 * b"\7" for label in range(10))
        names = [name for part in cifar._PARTS.values() for name in part]
        path.write_bytes(tar_bytes(dict.fromkeys(names, content), "w:gz"))
        return path, lambda: cifar.read_binary(path)
    path = folder / "weights.safetensors"
    write_weights(path, "hyperset")
    return path, lambda: sorted(load_model(path)[0].state_dict().items())


def decoded(data: Any) -> Any:
    return [data.train_images, data.train_labels, data.test_images, data.test_labels]


KINDS = ("idx", "fetched", "list", "photographs", "records", "weights")


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(
            same(*pair) for pair in zip(left, right, strict=True)
        )
    return left == right


def outcome(path: Path, read: Read, expected: Any) -> str:
    """ "data", "refused", or what went wrong."""
    try:
        found = read()
    except ValueError as error:
        return "refused" if path.name in str(error) else f"no name: {error!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "data" if same(found, expected) else "other data"


@pytest.fixture(params=KINDS)
def case(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path, Read, Any, bytes]:
    path, read = prepare(request.param, folder)
    # As if the damage had passed the checksum: the decoders must stand on their own.
    monkeypatch.setattr(cifar, "check_md5", lambda *_: None)
    return request.param, path, read, read(), path.read_bytes()


@pytest.mark.defect("C4")
def test_cut_files_are_refused(case: tuple[str, Path, Read, Any, bytes]) -> None:
    _, path, read, expected, content = case
    ends = np.unique(np.linspace(0, len(content) - 1, 40).astype(int)).tolist()
    for end in ends:
        path.write_bytes(content[:end])
        assert outcome(path, read, expected) == "refused", end


@pytest.mark.defect("C4")
def test_flipped_bytes(case: tuple[str, Path, Read, Any, bytes]) -> None:
    """Found by the checksums of gzip, xz and zip; of weights, whatever is read is read in order."""
    kind, path, read, expected, content = case
    generator = np.random.default_rng(1)
    places = [*range(12), *generator.integers(0, len(content), 60).tolist()]
    for place in places:
        changed = bytearray(content)
        changed[place] ^= int(generator.integers(1, 256))
        path.write_bytes(bytes(changed))
        found = outcome(path, read, expected)
        if kind == "weights" and found == "other data":
            continue  # a number of the weights
        assert found in ("data", "refused"), (place, found)


@pytest.mark.defect("C4")
def test_files_of_other_formats_are_refused(case: tuple[str, Path, Read, Any, bytes]) -> None:
    _, path, read, expected, _ = case
    for name, content in OTHERS.items():
        path.write_bytes(content)
        assert outcome(path, read, expected) == "refused", name


def test_a_missing_file_stays_the_systems_error(tmp_path: Path) -> None:
    for read in (read_idx, read_list, cifar.read_binary, cifar.decode_jpeg, load_model):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "nothing-here")


def member_of(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    """A tar header with a right checksum, whatever it claims."""
    head = bytearray(512)
    head[: len(name)] = name
    head[100:108] = b"0000644\0"
    head[124 : 124 + len(size)] = size
    head[156:157], head[257:265] = kind, b"ustar\x0000"
    head[148:156] = 8 * b" "
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


HOSTILE_ARCHIVES = {
    "climbing out": tar_bytes({"../../train/dog/1.jpg": jpeg()}, "w:gz"),
    "absolute": tar_bytes({"/train/dog/1.jpg": jpeg()}, "w:gz"),
    "huge member": member_of(b"train/dog/1.jpg", b"77777777777\0") + bytes(2048),
    "negative size": member_of(b"train/dog/1.jpg", b"\xff" * 12) + bytes(2048),
    "link": member_of(b"train/dog/1.jpg", b"00000000000\0", b"2") + bytes(2048),
    "device": member_of(b"train/dog/1.jpg", b"00000000000\0", b"3") + bytes(2048),
    "long names in long names": 3000 * (member_of(b"././@LongLink", b"00000000001\0", b"L") + bytes(512)),
    "huge long name": member_of(b"././@LongLink", b"77777777777\0", b"L") + bytes(2048),
    "no image": tar_bytes({"train/dog/1.jpg": b"text", "test/dog/1.jpg": b"text"}, "w:gz"),
    "a gif": tar_bytes({"train/dog/1.jpg": b"GIF89a" + bytes(40)}, "w:gz"),
    "cut image": tar_bytes({"train/dog/1.jpg": jpeg()[:-20]}, "w:gz"),
    "large image": tar_bytes({"train/dog/1.jpg": jpeg((64, 64))}, "w:gz"),
    "image bomb": tar_bytes(
        {"train/dog/1.jpg": jpeg().replace(struct.pack(">HH", 32, 32), struct.pack(">HH", 65500, 65500))},
        "w:gz",
    ),
    "large file": tar_bytes({"train/dog/1.jpg": jpeg() + bytes(10**6)}, "w:gz"),
}  # fmt: skip


@pytest.mark.defect("C4")
@pytest.mark.parametrize("name", HOSTILE_ARCHIVES)
def test_hostile_archives(name: str, folder: Path) -> None:
    path = folder / "cifar10" / cifar.JPEG
    path.write_bytes(HOSTILE_ARCHIVES[name])
    before = {each for each in folder.rglob("*")}
    with pytest.raises(ValueError, match=cifar.JPEG):
        load_cifar10()
    with pytest.raises(ValueError, match=cifar.JPEG):
        cifar.read_binary(path)
    assert {each for each in folder.rglob("*")} == before


@pytest.mark.defect("C4")
def test_links_give_no_data(folder: Path) -> None:
    path = folder / "a.tar"
    path.write_bytes(member_of(b"a", b"00000000000\0", b"1") + tar_bytes({"b": b"12"}, "w:"))
    assert list(read_members(path, most=10**5, largest=9)) == [("b", b"12")]


def measured(read: Read, expected: str) -> int:
    """Bytes held at most by Python and NumPy while a file is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=expected):
            read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


BOMB = 2**24  # bytes: enough to be seen, quick to make


@pytest.mark.defect("C4")
@pytest.mark.parametrize("pack", [gzip.compress, partial(lzma.compress, preset=0)])
def test_bombs_are_not_unpacked(
    pack: Callable[[bytes], bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more is unpacked than the caller allows."""
    path = folder / "bomb"
    path.write_bytes(pack(idx_bytes() + bytes(BOMB)))
    assert measured(lambda: read_idx(path, most=1000), "bomb: too long: over 1000") < BOMB // 4
    path.write_bytes(pack(idx_bytes(shape=(2**31, 2**20)) + bytes(1000)))
    assert measured(lambda: read_idx(path), "bomb: 1132 bytes, expected") < BOMB // 4
    small = RemoteFile("", "bomb", "", "", (), most=1000)
    assert measured(lambda: fetch(small), "bomb: too long: over 1000 bytes") < BOMB // 4
    path = folder / "cifar10" / cifar.JPEG
    path.write_bytes(pack(tar_bytes({"train/dog/1.jpg": bytes(BOMB)}, "w:")))
    monkeypatch.setattr(cifar, "MOST_UNPACKED", 2**20)
    assert measured(lambda: cifar.decode_jpeg(path), "too long: over 1048576") < BOMB // 4
    monkeypatch.setattr(cifar, "MOST_UNPACKED", 2**29)
    with pytest.raises(ValueError, match="expected at most 65536"):
        cifar.decode_jpeg(path)


def npy(header: str, content: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + content


def npy_zip(puzzle: bytes, solution: bytes | None = None) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("puzzle.npy", puzzle)
        archive.writestr("solution.npy", puzzle if solution is None else solution)
    return file.getvalue()


def header(shape: str, kind: str = "|u1") -> str:
    return f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"


HOSTILE_LISTS = {
    "huge": npy_zip(npy(header("(1099511627776, 81)"))),
    "overflow": npy_zip(npy(header("(99999999999999999999999, 81)"))),
    "many": npy_zip(npy(header("(250001, 81)"), bytes(250001 * 81))),
    "negative": npy_zip(npy(header("(-1, 81)"))),
    "short": npy_zip(npy(header("(3, 81)"), bytes(80))),
    "long": npy_zip(npy(header("(1, 81)"), bytes(10**6))),
    "objects": npy_zip(npy(header("(1, 81)", "|O"), bytes(1000))),
    "structure": npy_zip(npy("{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (1, 81)}")),
    "wide numbers": npy_zip(npy(header("(1, 81)", "<i999999999"))),
    "nested": npy_zip(npy(9000 * "(")),
    "long header": npy_zip(npy("{'descr': '|u1', 'shape': (1, 81)" + 20000 * " " + "}")),
    "huge header": npy_zip(b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**26) + 2**26 * b" ", b""),
    "other version": npy_zip(npy(header("(1, 81)"), bytes(81), b"\x09\x00")),
    "a name in another case": npz_bytes(Puzzle=np.zeros((1, 81), "u1"), solution=np.zeros((1, 81), "u1")),
    "real pickle": npz_bytes(**{name: board.astype(object) for name, board in boards().items()}),
    "numbers too large": npz_bytes(puzzle=np.full((1, 81), 2**63, "u8"), solution=np.ones((1, 81), "u1")),
}  # fmt: skip


@pytest.mark.defect("C4")
@pytest.mark.parametrize("name", HOSTILE_LISTS)
def test_hostile_lists(name: str, folder: Path) -> None:
    path = folder / "list.npz"
    path.write_bytes(HOSTILE_LISTS[name])
    assert measured(lambda: read_list(path), r"list\.npz") < 2**24


@pytest.mark.defect("B5")
@pytest.mark.parametrize("kind", ["f4", "f8", "?", "c8", "S1"])
@pytest.mark.parametrize("part", ["puzzle", "solution"])
def test_only_integers_are_digits(kind: str, part: str, folder: Path) -> None:
    """1.5 was read as 1."""
    path, held = folder / "list.npz", boards()
    held[part] = held[part].astype(kind)
    if kind[0] == "f":
        held[part][held[part] == 1] = 1.5
    path.write_bytes(npz_bytes(**held))
    with pytest.raises(ValueError, match=rf"list\.npz: {part} is .*, expected integers"):
        read_list(path)


@pytest.mark.parametrize("kind", ["u1", ">i2", "<i4", "u8"])
def test_integers_of_any_kind_are_read(kind: str, folder: Path) -> None:
    path, held = folder / "list.npz", boards()
    digits, by_columns = held["puzzle"].astype(kind), np.asfortranarray(held["solution"])
    path.write_bytes(npz_bytes(puzzle=digits, solution=by_columns))
    puzzles, solutions = read_list(path)
    assert np.array_equal(puzzles.numpy(), held["puzzle"])
    assert np.array_equal(solutions.numpy(), held["solution"])


def deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


WRONG_BACKBONES: list[Any] = [
    None, 3, "crate", [], {}, {"name": 3}, {"name": "resnet", "dim": 8, "heads": 2},
    *[{"name": "hyperset", "dim": 8, "heads": 2, **wrong} for wrong in (
        {"dim": 10**12}, {"dim": "8"}, {"dim": None}, {"dim": -8}, {"dim": 8.5}, {"heads": 3},
        {"dim": 65536, "width": 65536}, {"layers": 10**9}, {"layers": 900, "dim": 4096},
        {"iterations": 10**15}, {"iterations": True, "colour": 3}, {"time_dim": 10**6},
        {"lora_rank": 50_000, "dim": 8192}, {"step_size": []}, {"width": [8]}, {"initial_step": "x"},
        {"layer": 3}, {"name": "hyperset-equilibrium", "layer": {"max_steps": -1}}, {"self": 1},
    )],
]  # fmt: skip
WRONG_SETTINGS: list[Any] = [
    3, None, [], {}, {"model": 3}, {"model": {}}, {"model": {"kind": "x", "backbone": {}}},
    {"model": deep(50)},
    *[{"model": {**specification("crate"), "backbone": wrong}} for wrong in WRONG_BACKBONES],
    *[{"data": "digits", "model": {**specification("crate", iterations=3), **wrong}} for wrong in (
        {"image_size": 10**9}, {"image_size": 0}, {"channels": 10**6}, {"classes": 100_000}, {"patch": "4"},
        {"readout": 3}, {"colour": 3}, {"kind": ["image-classifier"]}, {"classes": None},
    )],
    *[{"model": specification("crate", iterations=3), **wrong} for wrong in (
        {"data": "imagenet"}, {"data": 3}, {"data": ["digits"]}, {"data": "../digits"},
        {"data": "digits", "rtol": "x"}, {"data": "digits", "rtol": -1}, {"data": "digits", "rtol": [1]},
    )],
]  # fmt: skip


RIGHT = {"data": "digits", "model": specification("crate", iterations=3)}
WRONG_PROGRESS = [
    *[(RIGHT["model"], {"settings": wrong, "history": []}) for wrong in WRONG_SETTINGS],
    *[
        (RIGHT["model"], {"settings": RIGHT, "history": wrong})
        for wrong in (3, [3], "x", [{"evaluations": "x"}], {"evaluations": 3}, [[]])
    ],
]


@pytest.mark.defect("C4")
@pytest.mark.parametrize("number", range(len(WRONG_PROGRESS)))
def test_weights_that_ask_for_something_wrong(number: int, tmp_path: Path) -> None:
    """A sound file with settings or a history that nobody wrote; no memory is taken for what they name."""
    path, (model, progress) = tmp_path / "weights.safetensors", WRONG_PROGRESS[number]
    save_checkpoint(path, build_model(model), progress=progress)
    with torch.device("meta"):  # whose first tensors import half of torch
        build_model(model)
    assert measured(lambda: open_subject(path), r"weights\.safetensors") < 2**24


# CIFAR-10 that is whole: small archives, and the real one where it is at hand.


def test_binary_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, generator = folder / "cifar10" / cifar.BINARY, np.random.default_rng(0)
    path.with_name(cifar.JPEG).write_bytes(tar_bytes(photographs(), "w:xz"))
    pixels = generator.integers(0, 256, (6, 10, 3072), dtype=np.uint8)
    records = np.concatenate([np.tile(np.arange(10, dtype="u1"), (6, 1))[..., None], pixels], 2)
    names = [name for part in cifar._PARTS.values() for name in part]
    files = {name: each.tobytes() for name, each in zip(names, records, strict=True)}

    def write() -> None:
        path.write_bytes(tar_bytes(files, "w:gz"))
        monkeypatch.setattr(cifar, "BINARY_MD5", hashlib.md5(path.read_bytes()).hexdigest())

    write()
    data = load_cifar10()  # the original comes before the copy
    assert (data.name, data.classes) == ("cifar10", 10)
    assert data.train_labels.tolist() == 5 * list(range(10))
    images = torch.cat([data.train_images, data.test_images]) * 255
    assert np.array_equal(images.round().byte().flatten(1).numpy(), pixels.reshape(60, 3072))
    for length in (0, 3072, 3074):
        with pytest.raises(ValueError, match=f"here: {length} bytes, expected a multiple of 3073"):
            cifar.parse_binary(bytes(length), source="here")
    del files[names[3]]
    write()
    with pytest.raises(ValueError, match=r"holds no cifar-10-batches-bin/data_batch_4\.bin"):
        load_cifar10()
    monkeypatch.setattr(cifar, "BINARY_MD5", "0" * 32)
    with pytest.raises(ValueError, match=f"{cifar.BINARY}: md5 .* expected 0000"):
        load_cifar10()


def test_jpeg_files(folder: Path) -> None:
    """Each image of one colour, so that JPEG keeps it."""
    path, files = folder / "cifar10" / cifar.JPEG, photographs()
    path.write_bytes(tar_bytes(files, "w:xz"))
    data = load_cifar10()
    assert data.name == "CIFAR-10 (JPEG)"
    assert data.train_labels.tolist() == [index for index in range(10) for _ in range(5)]
    colours = (255 * data.train_images).mean((2, 3))
    expected = [[20 * index + each, 100, 50] for index in range(10) for each in range(5)]
    assert (colours - torch.tensor(expected)).abs().max() < 3
    del files["test/dog/0.jpg"]
    path.write_bytes(tar_bytes(files, "w:xz"))
    with pytest.raises(ValueError, match=r"\[1, 1, 1, 1, 1, 0, .* test images, expected 1"):
        load_cifar10()


@pytest.mark.slow
def test_the_real_copy() -> None:
    """Its test images; reading the training images as well takes four times as long."""
    pytest.importorskip("PIL", reason="needs the extra [examples]")
    if REAL is None:
        pytest.skip(f"cifar10/{cifar.JPEG} is not at hand (IMPLICIT_ATTN_DATA)")
    images, labels = cifar.decode_jpeg(REAL, ["test"])["test"]
    assert images.shape == (10_000, 3, 32, 32) and images.dtype == torch.uint8
    assert labels.long().bincount().tolist() == 10 * [1000]
    # The mean colour of the test images of the original.
    mean = images.float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(mean, torch.tensor([0.4942, 0.4851, 0.4504]), atol=2e-3, rtol=0)

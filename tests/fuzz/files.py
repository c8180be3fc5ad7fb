"""Damaged files: a reader gives either what was written or a ValueError that names the file."""

from __future__ import annotations

import gzip
import io
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuzz.cases import Draw
from fuzz.invariants import PACKAGES, Call, same
from implicit_attn.checkpoint import load_checkpoint, read_progress, save_checkpoint
from implicit_attn.data.cifar import parse_binary
from implicit_attn.data.mnist import parse_idx, read_idx
from implicit_attn.data.sudoku import read_list
from implicit_attn.data.sudoku_boards import unique_puzzles

KINDS = ("checkpoint", "checkpoint", "checkpoint", "sudoku", "idx", "idx.gz", "cifar")


def damage(draw: Draw, content: bytes) -> bytes:
    """A few bytes flipped, cut out, put in, doubled or zeroed, or another file altogether."""
    random, data = draw.random, bytearray(content)
    kind = draw.choose(
        "damage", ("bit", "bytes", "cut", "head", "insert", "zeros", "double", "swap", "other", "none"),
        (4, 3, 3, 3, 1, 2, 1, 1, 1, 1),
    )  # fmt: skip
    # Headers stand in front, directories of archives at the end.
    ends = random.choice(
        ((0, len(data)), (0, min(len(data), 200)), (max(0, len(data) - 200), len(data)))
    )
    place = draw.note("at", random.randrange(ends[0], max(ends[1], ends[0] + 1)))
    length = random.randint(1, 40)
    if kind == "bit":
        data[place] ^= 1 << random.randrange(8)
    elif kind == "bytes":
        for _ in range(random.randint(1, 5)):
            data[random.randrange(*ends)] = random.randrange(256)
    elif kind == "cut":
        del data[place:]
    elif kind == "head":
        del data[: random.randint(1, 20)]
    elif kind == "insert":
        data[place:place] = random.randbytes(length)
    elif kind == "zeros":
        data[place : place + length] = bytes(len(data[place : place + length]))
    elif kind == "double":
        data += data[-length:]
    elif kind == "swap":
        data[place : place + length] = bytes(reversed(data[place : place + length]))
    elif kind == "other":
        return random.choice(
            (b"", b"\x00" * 100, b"PK\x03\x04", b"\x1f\x8b", b"{}", random.randbytes(99))
        )
    return bytes(data)


def check(draw: Draw) -> None:
    """One file, damaged."""
    kind = draw.choose("file", KINDS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"fuzz-{kind}"
        if kind == "checkpoint":
            _check_checkpoint(draw, path)
        else:
            whole, read = _data_file(kind)
            path.write_bytes(damage(draw, whole))
            _check_reading(draw, path, lambda: read(path), *_expected(kind))


_EXPECTED: dict[str, tuple[Any, ...]] = {}


def _idx(values: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    return head + values.astype(np.uint8).tobytes()


def _data_file(kind: str) -> tuple[bytes, Callable[[Path], Any]]:
    """A small good file and its reader."""
    generator = np.random.default_rng(0)
    if kind.startswith("idx"):
        content = _idx(generator.integers(0, 256, (4, 5, 6)))
        packed = gzip.compress(content, mtime=0) if kind == "idx.gz" else content
        if kind == "idx":
            return packed, lambda path: parse_idx(path.read_bytes(), source=str(path))
        return packed, read_idx
    if kind == "cifar":
        content = generator.integers(0, 10, (2, 3073)).astype(np.uint8).tobytes()
        return content, lambda path: parse_binary(path.read_bytes(), source=str(path))
    if "boards" not in _EXPECTED:
        _EXPECTED["boards"] = unique_puzzles(2, 0)
    puzzles, solutions = _EXPECTED["boards"]
    buffer = io.BytesIO()
    np.savez(
        buffer, puzzle=puzzles.numpy().astype(np.int8), solution=solutions.numpy().astype(np.int8)
    )
    return buffer.getvalue(), read_list


def _expected(kind: str) -> tuple[Any, Callable[[Any], bool]]:
    """What the whole file holds, and what may be told from its content alone to be sound.

    Without a checksum inside, changed pixels are pixels; that is checked by md5 one level above.
    """
    if kind == "sudoku":
        return _EXPECTED["boards"], lambda boards: bool((boards[1].sort(1).values[:, 0] == 1).all())
    return None, lambda result: all(isinstance(t, Tensor) for t in pytree.tree_leaves(result))


def _check_reading(
    draw: Draw, path: Path, read: Callable[[], Any], whole: Any, sound: Callable[[Any], bool]
) -> None:
    """The right data, or ValueError that names the file."""
    call = Call(draw, read)
    if call.error is None:
        equal = whole is not None and _all_same(*map(pytree.tree_leaves, (call.result, whole)))
        draw.expect(equal or sound(call.result), "content", "wrong data were accepted")
        return
    place = traceback.extract_tb(call.error.__traceback__)[-1]
    told = f"{type(call.error).__name__} at {place.name}: {call.error}"[:300]
    draw.expect(isinstance(call.error, ValueError), "exceptions", told)
    draw.expect(path.name in str(call.error), "exceptions", f"the file is not named: {told}")
    own = any(package in place.filename for package in PACKAGES)
    draw.expect(own, "exceptions", f"not of the package: {told}")


def _all_same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(_same, left, right))


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return same(left, right)
    return type(left) is type(right) and left == right


def _model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    torch.set_rng_state(state)
    return model, optimizer


def _contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    trees = (model.state_dict(), optimizer.state_dict())
    leaves = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(trees)[0]}
    return [t.clone() if isinstance(t, Tensor) else t for _, t in sorted(leaves.items())]


def _check_checkpoint(draw: Draw, path: Path) -> None:
    """A damaged checkpoint: everything as it was saved, or nothing changed and a ValueError."""
    model, optimizer = _model(0)
    progress = {"epoch": 3, "history": [{"loss": 0.5}], "settings": {"dim": 8}}
    save_checkpoint(path, model, optimizer, progress)
    saved = _contents(model, optimizer)
    path.write_bytes(damage(draw, path.read_bytes()))
    if draw.chance(0.2):
        _check_reading(draw, path, lambda: read_progress(path), progress, lambda result: False)
        return
    other, its_optimizer = _model(1)
    before, random_state = _contents(other, its_optimizer), torch.get_rng_state()
    restore = draw.note("restore_random", draw.chance(0.3))
    result: list[Any] = []

    def load() -> Any:
        try:
            result.append(load_checkpoint(path, other, its_optimizer, restore_random=restore))
        finally:
            result.append(torch.get_rng_state())
            torch.set_rng_state(random_state)
        return result[0], _contents(other, its_optimizer)

    _check_reading(draw, path, load, (progress, saved), lambda result: False)
    if len(result) == 1:  # nothing was loaded
        after = _contents(other, its_optimizer)
        kept = _all_same(before, after)
        draw.expect(
            kept and same(result[0], random_state), "failed load", "changed what it was given"
        )

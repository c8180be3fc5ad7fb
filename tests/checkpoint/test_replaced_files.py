"""Files that are replaced whole: their mode, what a kill leaves, and who may write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from implicit_attn.checkpoint import save_checkpoint
from implicit_attn.checkpoint.files import RunLock

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
posix = pytest.mark.skipif(sys.platform == "win32", reason="modes and locks of POSIX")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def umask() -> Iterator[int]:
    value = 0o027
    before = os.umask(value)
    yield value
    os.umask(before)


@posix
@pytest.mark.defect("B3")
def test_the_mode_is_that_of_the_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "run.safetensors"
    for _ in range(2):
        save_checkpoint(path, nn.Linear(2, 2))
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask


# Holds the lock, or writes a file, until it is killed.
HOLDER = """
import sys, time
from pathlib import Path
from implicit_attn.checkpoint.files import RunLock, replacing
path = Path(sys.argv[2])
if sys.argv[1] == "lock":
    RunLock(path).acquire()
    print("ready", flush=True)
    time.sleep(600)
with replacing(path) as file:
    file.write(b"half")
    file.flush()
    print("ready", flush=True)
    time.sleep(600)
"""


def hold(what: str, path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, what, str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)


@posix
@pytest.mark.defect("B3")
def test_what_a_kill_left_is_swept_and_what_is_written_is_not(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(b"old")
    writer = hold("write", path)
    try:
        lock = RunLock(path)
        lock.acquire()  # a sweep, while the other one writes
        assert len(list(tmp_path.glob("*.part"))) == 1
        lock.release()
    finally:
        kill(writer)
    assert len(list(tmp_path.glob("*.part"))) == 1
    other = tmp_path / "notes.part"
    other.write_text("not ours")
    lock.acquire()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        path.name,
        f"{path.name}.lock",
        other.name,
    ]
    lock.release()
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, other.name]
    assert path.read_bytes() == b"old"


@posix
@pytest.mark.defect("B6")
def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "new" / "checkpoint.safetensors"
    owner = hold("lock", path)
    lock = RunLock(path)
    try:
        with pytest.raises(
            ValueError, match=rf"new is in use by another run \(process {owner.pid} "
        ):
            lock.acquire()
    finally:
        kill(owner)
    for _ in range(2):
        lock.acquire()
    other = RunLock(path)
    with pytest.raises(ValueError, match=f"process {os.getpid()} "):
        other.acquire()
    lock.release()
    with pytest.raises(ValueError, match="in use"):
        other.acquire()
    lock.release()
    other.acquire()
    other.release()
    assert list(path.parent.iterdir()) == []

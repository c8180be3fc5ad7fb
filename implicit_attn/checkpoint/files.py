"""Files that are replaced whole or not at all, and locks that end with the process that holds them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from solvers.core.guards.telling import warn_user

# _lock(handle): lock an open file until it is closed, or its process ends. False: another process has
# it. None: its file system knows no locks.
if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> bool | None:
        os.lseek(handle, 1 << 20, os.SEEK_SET)  # beyond the text, which others may then read
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            os.lseek(handle, 0, os.SEEK_SET)
        return True

else:
    import fcntl

    def _lock(handle: int) -> bool | None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True


MOVES_OPEN_FILES = sys.platform != "win32"
BINARY = getattr(os, "O_BINARY", 0)
PART = re.compile(r".+\.[0-9a-f]{32}\.part")  # a file that is being written


def _is_file(path: Path, handle: int) -> bool:
    """Whether ``path`` is still the file that was opened."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _open_locked(path: Path) -> tuple[int, bool | None]:
    """Open a file, made with the umask's mode where there is none, and :func:`_lock` it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | BINARY, 0o666)
        locked = _lock(handle)
        if locked is False or _is_file(path, handle):
            return handle, locked
        os.close(handle)  # its last owner removed it between the two calls


def _remove_locked(path: Path, handle: int) -> None:
    """Close a file of :func:`_open_locked` and remove it, if it is still there."""
    if MOVES_OPEN_FILES:
        if _is_file(path, handle):
            path.unlink()
        os.close(handle)
    else:
        os.close(handle)
        with contextlib.suppress(OSError):  # the next owner has it already
            path.unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` at the end, and disappears after an error.

    It is written in the same folder, with the mode that the umask leaves, and is on the disk when it
    takes the place: whatever happens, ``path`` is the old file or the new one. While it is written it
    is locked, so that :func:`sweep` can tell it from one that a dead process left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part, handle = _open_part(path)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if MOVES_OPEN_FILES:
                os.replace(part, path)
        if not MOVES_OPEN_FILES:
            os.replace(part, path)
        _sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)  # after a failure


def _open_part(path: Path) -> tuple[Path, int]:
    while True:
        # A unique name, so that another process saving to this path does not move an unfinished file.
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        handle, locked = _open_locked(part)
        if locked is not False:
            return part, handle
        os.close(handle)  # taken for a dead one before it was locked, by a sweep that removes it


def _sync_folder(folder: Path) -> None:
    """Put the folder's names on the disk, where the system can."""
    # Windows opens no folders, and some network file systems refuse; the file is written by then.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sweep(folder: Path) -> list[Path]:
    """Remove the unfinished files of :func:`replacing` that dead processes left; returns them."""
    swept = []
    for path in folder.iterdir():
        if not (PART.fullmatch(path.name) and path.is_file()):
            continue
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError:  # removed in between, or somebody else's
            continue
        if _lock(handle) is True:
            _remove_locked(path, handle)
            swept.append(path)
        else:  # it is being written, or nobody can know
            os.close(handle)
    return swept


class RunLock:
    """The right to write the files of one run, which one process at a time has.

    The lock is that of an open file beside the checkpoint (``flock``), so that it ends with the
    process however that ends. It may be taken several times by its owner.

    Args:
        path: of the run's checkpoint; the lock is ``path`` + ".lock".
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self.path, self.file = path, path.with_name(path.name + ".lock")
        self.handle: int | None = None
        self.depth = 0

    def acquire(self) -> None:
        """Take it, and remove unfinished files of dead processes from the folder.

        Raises:
            ValueError: another run has it, or the folder cannot be written.
        """
        if self.depth == 0:
            self.handle = self._open()
            sweep(self.path.parent)
        self.depth += 1

    def release(self) -> None:
        """Give it back, as often as it was taken."""
        self.depth -= 1
        if self.depth > 0 or self.handle is None:
            return
        handle, self.handle = self.handle, None
        _remove_locked(self.file, handle)

    def _open(self) -> int:
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.is_dir():
                raise IsADirectoryError(21, "it is a folder", str(self.path))
            handle, locked = _open_locked(self.file)
        except OSError as error:
            raise ValueError(
                f"{error.filename or folder} cannot be written ({error.strerror or error}); "
                f"{folder} must be a folder, or a name for one, in which files can be made"
            ) from error
        if locked is False:
            owner = os.read(handle, 200).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise ValueError(
                f"{folder} is in use by another run ({owner}); wait for its end, or name another "
                "folder"
            )
        if locked is None:
            warn_user(
                f"the file system of {folder} knows no locks: nothing keeps two runs apart there",
                RuntimeWarning,
                f"locks in {folder}",
            )
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return handle

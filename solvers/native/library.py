"""Compiled kernels: found in the user's cache or compiled into it, checked, and loaded.

Code is loaded only from a folder that nobody else may write to, so that nobody else can choose what
runs. A file's name holds a digest of all that it was made of, so that a changed source, compiler or
processor has a file of its own; a file appears complete, under its name, or not at all.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

SHARED = Path(__file__).parent  # headers for the sources of all kernels
# By what torch says of the processor, which its variable ATEN_CPU_CAPABILITY can lower.
INSTRUCTIONS = {"AVX512": ("-mavx512f", "-mfma"), "AVX2": ("-mavx2", "-mfma")}
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-fopenmp-simd", "-fvisibility=hidden",
         "-fno-exceptions", "-fno-rtti")  # fmt: skip
COMPILERS = ("g++", "clang++", "c++")
SECONDS = 300  # that a compiler may take

_LOG = logging.getLogger(__name__)
_LOCK = threading.Lock()
_LOADED: dict[Path, ctypes.CDLL | str] = {}  # by source: the library, or why there is none


class CannotBuild(Exception):
    """Why there is no compiled kernel on this machine."""


def library(source: Path) -> ctypes.CDLL | str:
    """The compiled ``source``, or why there is none. The first call in a process may compile it."""
    if source not in _LOADED:
        with _LOCK:
            if source not in _LOADED:
                _LOADED[source] = _built_and_loaded(source)
    return _LOADED[source]


def renew_lock() -> None:
    """For the child of a fork: who held the lock in the parent is not there to give it back."""
    global _LOCK
    _LOCK = threading.Lock()


def forget() -> None:
    """Let the next call of :func:`library` look again."""
    _LOADED.clear()


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/implicit-attn/kernels``, or the same in ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "implicit-attn" / "kernels"


def _built_and_loaded(source: Path) -> ctypes.CDLL | str:
    try:
        path = build(cache_folder(), source)
        check_private(path)
        found = ctypes.CDLL(str(path))
    except (CannotBuild, OSError, RuntimeError) as error:  # RuntimeError: there is no home
        _LOG.info("no C++ kernel %s: %s", source.stem, error)
        return str(error)
    _LOG.info("C++ kernel: %s", path)
    return found


def build(folder: Path, source: Path) -> Path:
    """The compiled ``source`` in ``folder``, compiled if it is not there.

    Raises:
        CannotBuild: for this system, processor, folder or compiler, saying why.
    """
    if os.name != "posix":
        raise CannotBuild(f"it is for Linux and macOS, not {sys.platform}")
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in INSTRUCTIONS:
        raise CannotBuild(
            f"it needs a processor with AVX2 or AVX-512, and torch reports {capability}"
        )
    compiler = find_compiler()
    if compiler is None:
        tried = "$CXX, " + ", ".join(COMPILERS)
        raise CannotBuild(f"no C++ compiler was found ({tried})")
    flags = [*FLAGS, *INSTRUCTIONS[capability]]
    digest = _digest(compiler, flags, source)
    path = private(folder) / f"{source.stem}-{capability.lower()}-{digest}.so"
    if not path.exists():
        _LOG.info("compiling a C++ kernel with %s into %s", shlex.join(compiler), path)
        _compile([*compiler, *flags, f"-I{SHARED}", str(source)], path)
    return path


def find_compiler() -> list[str] | None:
    """The command in ``$CXX``, which may have arguments, or the first of ``COMPILERS`` there is."""
    named = os.environ.get("CXX")
    if named:
        command = shlex.split(named)
        return command if command and shutil.which(command[0]) else None
    found = next(filter(shutil.which, COMPILERS), None)
    return None if found is None else [found]


def private(folder: Path) -> Path:
    """``folder``, made if need be, where nobody else may write to it or replace it.

    Raises:
        CannotBuild: it cannot be made, belongs to somebody else, or others may write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
    except OSError as error:
        raise CannotBuild(f"the cache {folder} cannot be made: {error}") from error
    check_private(folder)
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise CannotBuild(
                f"the cache {folder} is not safe: anybody may replace what is in {parent}"
            )
    return folder


def check_private(path: Path) -> None:
    """``CannotBuild`` unless this user owns ``path``, no link, and alone may write to it."""
    status = path.lstat()
    if status.st_uid != os.geteuid():
        raise CannotBuild(f"{path} is not loaded: it belongs to user {status.st_uid}")
    if stat.S_ISLNK(status.st_mode):
        raise CannotBuild(f"{path} is not loaded: it is a link")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise CannotBuild(f"{path} is not loaded: others may write to it (mode {mode:o})")


def _digest(compiler: list[str], flags: list[str], source: Path) -> str:
    """Of the sources, the flags and the compiler's name and version."""
    digest = hashlib.sha256()
    headers = [path for folder in {source.parent, SHARED} for path in folder.glob("*.h")]
    for path in [source, *sorted(headers)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = _run([*compiler, "--version"])
    digest.update("\0".join([*compiler, *flags, version]).encode())
    return digest.hexdigest()[:24]


def _compile(command: list[str], path: Path) -> None:
    """Under another name first: whoever finds the file finds all of it, and two may race."""
    handle, name = tempfile.mkstemp(suffix=".so", prefix="unfinished-", dir=path.parent)
    os.close(handle)
    try:
        _run([*command, "-o", name])
        os.chmod(name, 0o700)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip().splitlines()[:3]
        raise CannotBuild(f"{shlex.join(command)} failed: {' / '.join(said)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]} could not be run: {error}") from error
    return done.stdout

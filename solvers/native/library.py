"""The native engine: the library for the instructions of this processor, and the records that it reads."""

from __future__ import annotations

import ctypes
import hashlib
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "lib"  # no package: what is in it is no module
# By what torch says of the processor, which its variable ATEN_CPU_CAPABILITY can lower; best first.
LEVELS = {"AVX512": ("avx512", "avx2", "baseline"), "AVX2": ("avx2", "baseline")}


def levels() -> tuple[str, ...]:
    """The names of what this processor can run, the best first."""
    return LEVELS.get(torch.backends.cpu.get_cpu_capability(), ("baseline",))


@cache
def engine() -> ctypes.CDLL | None:
    """The library of the best level there is; None where the package was installed without a compiler.

    In a checkout whose C++ has changed since, it would read other records than it is given: torch computes.
    """
    if changed := changed_sources():
        warnings.warn(
            f"the native engine is older than {', '.join(changed)} and is not used: install the "
            "checkout again, pip install -e .",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    for level in levels():
        path = FOLDER / f"engine_{level}.so"
        if path.exists():
            return ctypes.CDLL(str(path))
    return None


def changed_sources() -> list[str]:
    """Files of a checkout that differ from those of which its libraries were built."""
    kept = FOLDER / "sources.txt"  # of an editable install alone
    lines = [line.split(" ", 1) for line in kept.read_text().splitlines()] if kept.exists() else []
    root = FOLDER.parents[2]
    return [
        name
        for digest, name in lines
        if not (root / name).exists()
        or hashlib.sha256((root / name).read_bytes()).hexdigest() != digest
    ]


def told() -> str:
    """Which engine runs, in words."""
    found = engine()
    if found is None:
        why = (
            "its sources have changed" if changed_sources() else "installed without a C++ compiler"
        )
        return f"none ({why}): torch computes instead"
    threads = "torch's threads" if THREADS.fork else "one thread"
    return f"{Path(found._name).stem.removeprefix('engine_')}, {threads}"


class Threads:
    """The threads that the engine may use: those of the OpenMP that torch uses, awake already."""

    def __init__(self) -> None:
        # A child inherits OpenMP's memory without its threads, and would wait for them forever.
        self.forked = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: setattr(self, "forked", True))

    @property
    def fork(self) -> int | None:
        """Where OpenMP starts its threads; None without one, or with another kind."""
        return _openmp()

    @property
    def number(self) -> int:
        """How many to use."""
        return 1 if self.forked else torch.get_num_threads()


@cache
def _openmp() -> int | None:
    try:
        start = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    return ctypes.cast(start, ctypes.c_void_p).value


THREADS = Threads()


NAMES = {torch.float32: "float", torch.float64: "double"}


def fields(pointers: str, integers: str, numbers: str) -> tuple[tuple[str, Any], ...]:
    """Fields of a structure, in the order of the header."""
    kinds = (pointers, ctypes.c_void_p), (integers, ctypes.c_int64), (numbers, ctypes.c_double)
    return tuple((name, kind) for names, kind in kinds for name in names.split())


def serves(like: Tensor) -> bool:
    """Whether the engine computes with such tensors now: outside of autograd's recordings."""
    known = like.dtype in NAMES and like.device.type == "cpu" and not torch.is_grad_enabled()
    return known and engine() is not None


@cache
def function(of: ctypes.CDLL | None, name: str, dtype: torch.dtype) -> Callable[[int], int]:
    """A function of the engine, of a record's address."""
    found = getattr(of, f"{name}_{NAMES[dtype]}")
    found.argtypes, found.restype = (ctypes.c_void_p,), ctypes.c_int64
    return found


def pieces(like: Tensor, dtype: torch.dtype, sizes: list[int]) -> tuple[Tensor, list[int]]:
    """Memory for so many numbers each, not set to anything, and where each piece begins."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // 16) * 16  # on cache lines
    memory = like.new_empty(total, dtype=dtype)
    first, width = memory.data_ptr(), memory.element_size()
    return memory, [first + width * start for start in starts]


def alike(image: Tensor, vector: Tensor, name: str, of: str) -> Tensor:
    """``image`` as the engine reads it: contiguous, no sign yet to be flipped, like ``vector``."""
    image = image.detach().contiguous().resolve_neg()
    if image.shape != vector.shape or image.dtype != vector.dtype:  # C++ would not ask
        wanted, got = (f"{tuple(t.shape)} {t.dtype}" for t in (vector, image))
        raise ValueError(f"{name} must be like {of}, {wanted}, got {got}")
    return image

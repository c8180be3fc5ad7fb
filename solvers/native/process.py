"""What kernels in C++ need of their process: whether they are wanted, and threads."""

from __future__ import annotations

import ctypes
import os

import torch

from solvers.native.library import renew_lock

VARIABLE = "IMPLICIT_ATTN_CPP"


def _enabled() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"the environment variable {VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"


# Whether kernels are taken unasked: their first use runs a compiler, which nobody should meet unasked.
ENABLED = _enabled()


class Threads:
    """The threads that a kernel may use: those of the OpenMP that torch uses, awake already."""

    def __init__(self) -> None:
        self._fork: int | None = None
        self._looked = False
        # A child inherits OpenMP's memory without its threads, and would wait for them forever.
        self.forked = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.now_forked)

    def now_forked(self) -> None:
        """This process is a child."""
        self.forked = True
        renew_lock()

    @property
    def fork(self) -> int | None:
        """Where OpenMP starts its threads; None without one, or with another kind."""
        if not self._looked:
            self._fork, self._looked = _openmp(), True
        return self._fork

    @property
    def number(self) -> int:
        """How many to use."""
        return 1 if self.forked else torch.get_num_threads()


def _openmp() -> int | None:
    try:
        start = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    return ctypes.cast(start, ctypes.c_void_p).value


THREADS = Threads()

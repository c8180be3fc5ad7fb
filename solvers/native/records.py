"""Records that the engine reads, and memory for them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from solvers.native import library

NAMES = {torch.float32: "float", torch.float64: "double"}


def fields(pointers: str, integers: str, numbers: str) -> tuple[tuple[str, Any], ...]:
    """Fields of a structure, in the order of the header."""
    kinds = (pointers, ctypes.c_void_p), (integers, ctypes.c_int64), (numbers, ctypes.c_double)
    return tuple((name, kind) for names, kind in kinds for name in names.split())


def serves(like: Tensor) -> bool:
    """Whether the engine computes with such tensors now: outside of autograd's recordings."""
    known = like.dtype in NAMES and like.device.type == "cpu" and not torch.is_grad_enabled()
    return known and library.engine() is not None


def function(name: str, dtype: torch.dtype) -> Callable[[int], int]:
    """The engine's function of a record's address."""
    return _function(library.engine(), f"{name}_{NAMES[dtype]}")


@cache
def _function(engine: Any, name: str) -> Callable[[int], int]:
    found = getattr(engine, name)
    found.argtypes, found.restype = (ctypes.c_void_p,), ctypes.c_int64
    return found


def pieces(like: Tensor, dtype: torch.dtype, sizes: list[int]) -> tuple[Tensor, list[int]]:
    """Memory for so many numbers each, not set to anything, and where each piece begins."""
    ends = list(accumulate(-(-size // 16) * 16 for size in sizes))  # on cache lines
    memory = like.new_empty(ends[-1], dtype=dtype)
    first, width = memory.data_ptr(), memory.element_size()
    return memory, [first + width * start for start in [0, *ends[:-1]]]


def alike(image: Tensor, vector: Tensor, name: str, of: str) -> Tensor:
    """``image`` as the engine reads it: contiguous, no sign yet to be flipped, like ``vector``."""
    image = image.detach().contiguous().resolve_neg()
    if image.shape != vector.shape or image.dtype != vector.dtype:  # C++ would not ask
        wanted, got = (f"{tuple(t.shape)} {t.dtype}" for t in (vector, image))
        raise ValueError(f"{name} must be like {of}, {wanted}, got {got}")
    return image

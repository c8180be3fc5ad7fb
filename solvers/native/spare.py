"""Memory that a solve leaves to the next one of its kind: small solves need not ask for it each time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import accumulate
from typing import Any, TypeVar

from torch import Tensor

SMALL = 1 << 20  # numbers; what is larger is given back
KINDS = 8  # that are kept, one of each

Made = TypeVar("Made")
_KEPT: dict[Hashable, Any] = {}


def take(kind: Hashable, make: Callable[[], Made]) -> Made:
    """What a solve of this ``kind`` has left, or a new one; nobody else has it until it is given back."""
    return _KEPT.pop(kind, None) or make()


def give_back(kind: Hashable, made: Any, numbers: int) -> None:
    """Leave what was taken, of so many ``numbers``, to the next solve of its ``kind``."""
    if numbers > SMALL:
        return
    if len(_KEPT) >= KINDS:
        _KEPT.clear()
    _KEPT[kind] = made


def pieces(like: Tensor, sizes: list[int]) -> tuple[Tensor, list[int]]:
    """Memory for so many numbers each, not set to anything, and where each piece begins."""
    ends = list(accumulate(-(-size // 16) * 16 for size in sizes))  # on cache lines
    memory = like.new_empty(ends[-1])
    first, width = memory.data_ptr(), memory.element_size()
    return memory, [first + width * start for start in [0, *ends[:-1]]]

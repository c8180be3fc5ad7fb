"""What a thread has read of modules in the solve that it is in: a walk through all of them takes a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

Found = TypeVar("Found")


class _Read(threading.local):
    """What was read, by who reads it or by the module; None: in no solve."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] | None = None


READ = _Read()


@contextmanager
def read_once() -> Iterator[None]:
    """Within, modules are read once, until :func:`read_anew`."""
    outer, READ.kept = READ.kept, {}
    try:
        yield
    finally:
        READ.kept = outer


def read_anew() -> None:
    """The user's own code has run, which may have changed a module."""
    if READ.kept is not None:
        READ.kept.clear()


def parts_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """``module.named_modules()``, each path but its own, ``""``, followed by a dot."""
    if torch.compiler.is_compiling():  # a compiler follows no variables of a thread
        return [(f"{path}." if path else "", part) for path, part in module.named_modules()]
    return found_once(module, lambda: _walk(module))


def found_once(what: Hashable, find: Callable[[], Found]) -> Found:
    """What has been found in this solve, of whatever hangs on modules alone."""
    kept = READ.kept
    if kept is None:
        return find()
    if what not in kept:
        kept[what] = find()
    return kept[what]


def _walk(module: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    open_places, seen = [("", module)], set[int]()
    while open_places:
        prefix, part = open_places.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        found.append((prefix, part))
        # By ``items``, which TorchScript's modules have too, without the other methods of a dict.
        for name, child in reversed(list(part._modules.items())):
            if child is not None:
                open_places.append((f"{prefix}{name}.", child))
    return found

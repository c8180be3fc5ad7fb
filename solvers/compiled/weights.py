"""The tensors that a module reads, and what else of it an evaluation may depend on."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from solvers.compiled.packing import fingerprint

_OF_EVERY_MODULE = set(vars(nn.Module()))


@dataclass(frozen=True)
class Weights:
    """Parameters and buffers of a module, by name.

    ``kind`` tells apart for which of its states programs differ: shapes, modes, plain attributes.
    """

    tensors: dict[str, Tensor]
    kind: Hashable


def read_module(module: nn.Module) -> tuple[dict[str, Tensor], Hashable]:
    """Parameters and buffers by name, each once, and what else an evaluation of the module may depend on.

    That is the modules' types, modes, numbers of hooks and own attributes.
    """
    tensors: dict[str, Tensor] = {}
    plain: list[Hashable] = []
    seen: set[int] = set()
    places: list[tuple[str, nn.Module]] = [("", module)]
    while places:  # one walk, as every solve takes it
        prefix, part = places.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        values = vars(part)
        for own in (values["_parameters"], values["_buffers"]):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    tensors[prefix + name] = tensor
        hooks = len(values["_forward_hooks"]) + len(values["_forward_pre_hooks"])
        plain += [prefix, type(part), part.training, hooks]
        plain += [(n, fingerprint(v)) for n, v in values.items() if n not in _OF_EVERY_MODULE]
        places += [(f"{prefix}{n}.", m) for n, m in values["_modules"].items() if m is not None]
    return tensors, tuple(plain)


class _Read(threading.local):
    """The weights that this thread has read in the solve that it is in, by who reads; None: in no solve."""

    def __init__(self) -> None:
        self.kept: dict[Any, Weights] | None = None


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

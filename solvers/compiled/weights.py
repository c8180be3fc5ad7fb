"""The tensors that a module reads, and what else of it an evaluation may depend on."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor, nn

from solvers.compiled.packing import fingerprint
from solvers.core.guards.reading import parts_of

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
    for prefix, part in parts_of(module):
        values = vars(part)
        for own in (values["_parameters"], values["_buffers"]):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    tensors[prefix + name] = tensor
        hooks = len(values["_forward_hooks"]) + len(values["_forward_pre_hooks"])
        plain += [prefix, type(part), part.training, hooks]
        plain += [(n, fingerprint(v)) for n, v in values.items() if n not in _OF_EVERY_MODULE]
    return tensors, tuple(plain)

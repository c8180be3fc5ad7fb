"""Parametrised weights that a layer computes once per solve; their modules can be pickled whole."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize

from solvers.core.context import CONTEXT
from solvers.core.modes import in_transform


def parametrise(module: nn.Module, name: str, parametrization: nn.Module) -> None:
    """Register a parametrization whose weight a layer computes once per solve.

    This is ``torch.nn.utils.parametrize.register_parametrization`` with two differences. A layer computes the
    weight before it solves and passes it on in a record of the thread. And ``module`` can still be pickled:
    torch gives a parametrised module a dynamic class, which cannot be pickled, and here loading the module
    recreates the class. A copy of a module shares its class, so adding a property also creates a new class
    for the module.
    """
    own_class(module)
    parametrize.register_parametrization(module, name, parametrization)
    _adapt(type(module), name)


def _adapt(made: Any, name: str) -> None:
    """Let the class read a weight that the layer has computed, and let its modules be pickled."""
    known: property = made.__dict__[name]
    assert known.fget is not None
    compute = known.fget

    def read(module: Any) -> Tensor:
        # A compiler cannot trace the variables of a thread, and merges equal computations itself.
        if torch.compiler.is_dynamo_compiling():
            return compute(module)
        part = module.parametrizations[name]
        weight, originals = CONTEXT.weights.get(id(part), (None, ()))
        # ``functional_call`` may have replaced what the weight was computed from.
        if weight is not None and all(map(operator.is_, originals, part._parameters.values())):
            return weight
        # A checkpoint in the update runs again after the solve, when the weight must be computed once more.
        # It must then save the same tensors as before, so it does not see those of this computation.
        with nullcontext() if in_transform() else saved_tensors_hooks(Tensor.detach, _same):
            return compute(module)

    setattr(made, name, property(read, known.fset))
    made.computed_once = getattr(made, "computed_once", frozenset()) | {name}
    made.__reduce_ex__ = _reduce


def _same(tensor: Tensor) -> Tensor:
    return tensor


def changes_when_read(modules: Iterable[nn.Module]) -> bool:
    """Return whether reading a weight may change a buffer, as torch's ``spectral_norm`` in training does."""
    for module in modules:
        lists: Any = module._modules.get("parametrizations") or ()
        own = getattr(module, "computed_once", ()) if lists else ()
        for name in lists:
            if name not in own and any(p.training and p._buffers for p in lists[name].modules()):
                return True
    return False


def own_class(module: nn.Module) -> None:
    """Give a parametrised module a class that is not shared with its copies."""
    if parametrize.is_parametrized(module):
        shared: Any = type(module)
        given = {k: v for k, v in vars(shared).items() if k not in ("__dict__", "__weakref__")}
        module.__class__ = type(shared.__name__, shared.__bases__, given)


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    kind, names = parametrize.type_before_parametrizations(module), list(module.parametrizations)  # type: ignore[arg-type]
    return _rebuilt, (kind, names), module.__dict__


def _rebuilt(kind: type[nn.Module], names: list[str]) -> nn.Module:
    """Return a module of ``kind`` with parametrised ``names``, without its state."""
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
        _adapt(type(module), name)
    return module

"""Parametrised weights (``torch.nn.utils.parametrize``) of modules that can be pickled."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize


def parametrise(module: nn.Module, name: str, parametrization: nn.Module) -> None:
    """Register a parametrization such that ``module`` can still be pickled.

    torch gives a parametrised module a dynamic class, which cannot be pickled. Here loading the module
    recreates the class. A copy of a module shares its class, so adding a property also creates a new class
    for the module.
    """
    own_class(module)
    parametrize.register_parametrization(module, name, parametrization)
    made: Any = type(module)
    made.__reduce_ex__ = _reduce


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
    made: Any = type(module)
    made.__reduce_ex__ = _reduce
    return module

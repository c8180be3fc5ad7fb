"""Parametrised weights (``torch.nn.utils.parametrize``) of modules that can be saved and pickled whole."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize


def parametrise(module: nn.Module, name: str, parametrization: nn.Module) -> None:
    """``torch.nn.utils.parametrize.register_parametrization``; ``module`` can be pickled as before.

    torch gives a parametrised module a class of its own, made on the spot, which refuses to be pickled.
    This one is made anew where the module is loaded. A copy of a module shares its class, so a class that
    gets another property is made anew for the module as well.
    """
    own_class(module)
    parametrize.register_parametrization(module, name, parametrization)
    made: Any = type(module)
    made.__reduce_ex__ = _reduce


def own_class(module: nn.Module) -> None:
    """Give a parametrised module a class that no copy of it shares."""
    if parametrize.is_parametrized(module):
        shared: Any = type(module)
        given = {k: v for k, v in vars(shared).items() if k not in ("__dict__", "__weakref__")}
        module.__class__ = type(shared.__name__, shared.__bases__, given)


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    kind, names = parametrize.type_before_parametrizations(module), list(module.parametrizations)  # type: ignore[arg-type]
    return _rebuilt, (kind, names), module.__dict__


def _rebuilt(kind: type[nn.Module], names: list[str]) -> nn.Module:
    """A module of ``kind`` with parametrised ``names``, whose state follows."""
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    made: Any = type(module)
    made.__reduce_ex__ = _reduce
    return module

"""The package ``solvers`` as ``implicit_attn.solvers``, with the same module objects."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

import solvers

if TYPE_CHECKING:
    from solvers import *  # noqa: F403


class _Modules(MetaPathFinder, Loader):
    """Import ``implicit_attn.solvers.X`` as ``solvers.X``, which Python would otherwise load again."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        own = name.removeprefix("implicit_attn.")
        if own == name or not own.startswith("solvers.") or importlib.util.find_spec(own) is None:
            return None
        return ModuleSpec(name, self)

    def exec_module(self, module: ModuleType) -> None:
        own = module.__name__.removeprefix("implicit_attn.")
        sys.modules[module.__name__] = importlib.import_module(own)


sys.meta_path.insert(0, _Modules())
sys.modules[__name__] = solvers

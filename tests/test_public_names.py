"""Every module imports under its own name, and every public name is there."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from types import ModuleType

import pytest

import implicit_attn
import solvers


def modules() -> list[str]:
    packages = (solvers, implicit_attn)
    found = [m.name for p in packages for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}.")]
    return [name for name in found if not name.endswith("__main__")]


def test_modules_are_found_under_their_names() -> None:
    """``import package.module as m`` gives the module, not a function of the same name."""
    for name in modules():
        if ".triton" in name and importlib.util.find_spec("triton") is None:
            continue
        scope: dict[str, object] = {}
        exec(f"import {name} as found", scope)
        found = scope["found"]
        assert isinstance(found, ModuleType) and found.__name__ == name


@pytest.mark.parametrize("name", ["solvers", "implicit_attn"])
def test_public_names_are_there(name: str) -> None:
    for path in [name, *(module for module in modules() if module.startswith(name))]:
        if ".triton" in path:
            continue
        module = importlib.import_module(path)
        for public in getattr(module, "__all__", ()):
            assert hasattr(module, public), f"{path}.{public}"

"""Import the modules of a package lazily, when one of its names is first accessed (PEP 562)."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of ``package`` from its ``__init__.pyi``.

    The stub has one line per public name, ``from home import name as name``, which type checkers also read.
    ``dir`` shows only these names. Submodules of the package are also accessible as attributes.
    """
    homes = _stated(package)

    def get(name: str) -> Any:
        module = f"{package}.{name}"
        if homes.get(name, package) != package:
            value = getattr(importlib.import_module(homes[name]), name)
        elif not name.startswith("_") and importlib.util.find_spec(module) is not None:
            value = importlib.import_module(module)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(homes), sorted(homes)


def _stated(package: str) -> dict[str, str]:
    """Return the public names and the modules that define them."""
    stub = Path(str(sys.modules[package].__file__)).with_name("__init__.pyi")
    if not stub.exists():
        return {}
    imports = [n for n in ast.parse(stub.read_text("utf-8")).body if isinstance(n, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}

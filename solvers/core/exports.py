"""What ``from package import *`` brings."""

from __future__ import annotations

from typing import Any

PACKAGES = ("solvers", "implicit_attn")


def define_all(namespace: dict[str, Any]) -> None:
    """Set ``__all__`` of a module to its classes, functions and constants that are of these packages.

    Modules, whose names a program may use itself (``data``, ``linear``), and what is imported from elsewhere
    are left out. Type checkers go by imports of the form ``from a import b as b``.
    """
    namespace["__all__"] = [
        name
        for name, value in namespace.items()
        if not name.startswith("_")
        and (name.isupper() or getattr(value, "__module__", "").partition(".")[0] in PACKAGES)
        and value is not define_all
    ]

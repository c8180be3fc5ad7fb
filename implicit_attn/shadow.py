"""Refuses to go on where ``import solvers`` finds something else than the package that comes along.

``solvers`` is a common name: a file ``solvers.py`` beside a script comes before every installed package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import NoReturn


def found() -> object:
    """The module that ``import solvers`` finds.

    Another one may import ``implicit_attn`` itself, of which nothing is there yet, and Python would
    blame a circular import. So a file solvers.py is refused without running it, and a folder whose
    import fails is refused unless it is the package of this distribution.

    Raises:
        ImportError: it is another module.
    """
    if "solvers" in sys.modules:
        return sys.modules["solvers"]
    spec = importlib.util.find_spec("solvers")
    if spec is not None and spec.submodule_search_locations is None:
        refuse(spec.origin)
    try:
        return importlib.import_module("solvers")
    except Exception as error:
        if spec is None or _holds_ours(spec):
            raise  # torch is missing, for example
        refuse(spec.origin, error)


def _holds_ours(spec: ModuleSpec) -> bool:
    return PathFinder.find_spec("solvers.lazy", spec.submodule_search_locations) is not None


def check(module: object) -> None:
    """Raise ImportError unless ``module`` is the package ``solvers`` of this distribution.

    Raises:
        ImportError: it is another module; the message names its file and says what to do.
    """
    if getattr(module, "DISTRIBUTION", None) == "implicit-attn":
        return
    place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
    refuse(place or repr(module))


def refuse(place: str | None, error: Exception | None = None) -> NoReturn:
    """Raise the ImportError that names ``place``, where another module of the name is."""
    raise ImportError(
        "implicit_attn comes with a package solvers, which another module of that name hides: "
        f"`import solvers` found {place}. Rename or move that file or folder, or start "
        "Python where it is not on the path (sys.path), then import again in a new process"
    ) from error


check(found())

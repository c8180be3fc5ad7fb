"""Refuses to go on where ``import solvers`` finds something else than the package that comes along.

``solvers`` is a common name: a file ``solvers.py`` beside a script comes before every installed package.
It may import ``implicit_attn`` itself, of which nothing is there yet; Python would blame a circular import.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from typing import NoReturn


def check(module: object) -> None:
    """Raise ImportError, naming its file, unless ``module`` is the package of this distribution."""
    if getattr(module, "DISTRIBUTION", None) != "implicit-attn":
        place = getattr(module, "__file__", None) or next(
            iter(getattr(module, "__path__", [])), None
        )
        _refuse(place or repr(module))


def check_import() -> None:
    """:func:`check` what ``import solvers`` finds; a file solvers.py is refused without running it."""
    if "solvers" not in sys.modules:
        spec = importlib.util.find_spec("solvers")
        if spec is not None and spec.submodule_search_locations is None:
            _refuse(spec.origin)
        try:
            importlib.import_module("solvers")
        except Exception as error:
            folders = None if spec is None else spec.submodule_search_locations
            if folders is None or PathFinder.find_spec("solvers.lazy", folders) is not None:
                raise  # of the right package: torch is missing, for example
            _refuse(spec.origin if spec else None, error)
    check(sys.modules["solvers"])


def _refuse(place: str | None, error: Exception | None = None) -> NoReturn:
    raise ImportError(
        "implicit_attn comes with a package solvers, which another module of that name hides: "
        f"`import solvers` found {place}. Rename or move that file or folder, or start "
        "Python where it is not on the path (sys.path), then import again in a new process"
    ) from error


check_import()

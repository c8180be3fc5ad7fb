"""Implicit attention: layers whose output is the fixed point of an energy descent or mean-field update.

``__init__.pyi`` lists the core names; all others are in the sub-packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from importlib.machinery import PathFinder

__version__ = "0.2.0"


def _import_solvers() -> None:
    """Import ``solvers``, and raise ImportError if another module of that name shadows it.

    A file ``solvers.py`` next to a script precedes installed packages. It is not run, because it may import
    this package, which is not yet initialised, and Python would report a circular import.
    """
    if "solvers" not in sys.modules:
        spec = importlib.util.find_spec("solvers")
        folders = None if spec is None else spec.submodule_search_locations
        if spec is not None and folders is None:
            raise _hidden(spec.origin)
        try:
            importlib.import_module("solvers")
        except Exception as error:
            if folders is None or PathFinder.find_spec("solvers.lazy", folders) is not None:
                raise  # another cause, such as a missing torch
            raise _hidden(spec.origin if spec else None) from error
    _check_solvers(sys.modules["solvers"])


def _check_solvers(module: object) -> None:
    """Raise ImportError unless ``module`` is the package of this distribution."""
    if getattr(module, "DISTRIBUTION", None) != "implicit-attn":
        folder = next(iter(getattr(module, "__path__", [])), None)
        raise _hidden(getattr(module, "__file__", None) or folder or repr(module))


def _hidden(place: str | None) -> ImportError:
    return ImportError(
        f"implicit_attn needs its own package solvers, but `import solvers` found {place}. Rename "
        "that file or folder or remove its directory from sys.path, then start a new Python process"
    )


_import_solvers()
from solvers.lazy import lazy_names  # noqa: E402 - nothing may be taken out of solvers before

__getattr__, __dir__, __all__ = lazy_names(__name__)

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the user asks

"""Implicit attention: layers whose output is the fixed point of an energy descent or mean-field update.

The core names stand in ``__init__.pyi``; all others are in the sub-packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from importlib.machinery import PathFinder

__version__ = "0.2.0"


def _import_solvers() -> None:
    """Import ``solvers``; refuse whatever hides it, a file solvers.py without running it.

    The name is common: a file ``solvers.py`` beside a script comes before every installed package. It may
    import this package, of which nothing is there yet, and Python would blame a circular import.
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
                raise  # nothing is hidden: torch is missing, for example
            raise _hidden(spec.origin if spec else None) from error
    _check_solvers(sys.modules["solvers"])


def _check_solvers(module: object) -> None:
    """Raise ImportError, naming its place, unless ``module`` is the package of this distribution."""
    if getattr(module, "DISTRIBUTION", None) != "implicit-attn":
        folder = next(iter(getattr(module, "__path__", [])), None)
        raise _hidden(getattr(module, "__file__", None) or folder or repr(module))


def _hidden(place: str | None) -> ImportError:
    return ImportError(
        f"implicit_attn needs its own package solvers, but `import solvers` finds {place}. Rename "
        "that file or folder or remove its directory from sys.path, then start a new Python process"
    )


_import_solvers()
from solvers.lazy import lazy_names  # noqa: E402 - nothing may be taken out of solvers before

__getattr__, __dir__, __all__ = lazy_names(__name__)

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the user asks

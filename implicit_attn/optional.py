"""Imports of optional dependencies, with an error that says which extra installs them."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional module.

    Args:
        module: dotted name, for instance ``"sklearn.datasets"``.
        extra: the extra in ``setup.cfg`` that lists it, for instance ``"examples"``.

    Returns:
        The module.

    Raises:
        ImportError: the module, or something that it imports, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} could not be imported ({error}); "
            f'it comes with: pip install "implicit-attn[{extra}]"'
        ) from error

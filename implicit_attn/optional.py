"""Imports of optional dependencies, with an error that says which extra installs them."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, *, extra: str) -> ModuleType:
    """Import ``"sklearn.datasets"``, say, which the extra ``"examples"`` of ``setup.cfg`` lists."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} could not be imported ({error}); "
            f'it comes with: pip install "implicit-attn[{extra}]"'
        ) from error

"""Optional dependencies: imports with helpful errors, and progress bars."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable
from types import ModuleType
from typing import TypeVar

Item = TypeVar("Item")

DISTRIBUTION = "implicit-attn"


def require(module: str, *, extra: str | None) -> ModuleType:
    """Import a module, such as ``"sklearn.datasets"``, of an extra of ``setup.cfg``, such as ``"examples"``.

    ``extra=None`` means a dependency of the package itself that is imported lazily.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        wanted = "." if extra is None else f'".[{extra}]"'
        raise ImportError(
            f"{module} could not be imported ({error}); install it with `pip install {wanted}` in a checkout "
            "of implicit-attn"
        ) from error


def progress(items: Collection[Item], title: str) -> Iterable[Item]:
    """Iterate over items with a progress bar on standard error, if tqdm is installed on a terminal."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return items
    return tqdm(items, desc=title, leave=False, disable=None)  # None: silent without a terminal

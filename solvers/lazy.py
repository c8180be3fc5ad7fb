"""Names of a package whose modules are imported when a name is first asked for (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``, for what few of its users need.

    ``package.name`` imports the module that has the name. The sub-packages and modules on the way to
    these modules are attributes of the package, too, as if it had imported them itself.

    Args:
        package: its name.
        homes: names separated by spaces, by the module that defines them; none where a sub-package
            is to be an attribute and nothing more.

    The package states the same under ``if TYPE_CHECKING``, so that type checkers, and whoever reads
    the imports, know where the names come from.
    """
    found = {name: home for home, names in homes.items() for name in names.split()}
    below: dict[str, list[str]] = {}  # modules by their first part below the package
    for home in homes:
        below.setdefault(home.removeprefix(f"{package}.").partition(".")[0], []).append(home)

    def get(name: str) -> Any:
        if name in found:
            value = getattr(importlib.import_module(found[name]), name)
        elif name in below:
            for home in below[name]:
                importlib.import_module(home)
            value = sys.modules[f"{package}.{name}"]
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *found, *below})

    return get, names

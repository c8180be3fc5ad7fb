"""Optional dependencies: imports with helpful errors, progress bars, and installed versions."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Collection, Iterable, Sequence
from types import ModuleType
from typing import TypeVar

Item = TypeVar("Item")

DISTRIBUTION = "implicit-attn"
# A requirement in metadata: its name, its extras, and the extra that requires it.
_NAME = re.compile(r"([\w.-]+)\s*(?:\[([\w.,-]+)\])?")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)")


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


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, such as ``"torch"``, or None if it is missing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements(lines: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Return the distributions that this package needs, under ``""``, and those of each extra.

    An extra that includes another one also contains its distributions.

    Args:
        lines: lines of ``Requires-Dist``; None for those of the installed package, or nothing if it is
            not installed.
    """
    if lines is None:
        try:
            lines = importlib.metadata.requires(DISTRIBUTION) or []
        except importlib.metadata.PackageNotFoundError:
            return {}
    own: dict[str, list[str]] = {}
    included: dict[str, list[str]] = {}  # extra -> extras that it includes
    for line in lines:
        name, extra = _NAME.match(line), _EXTRA.search(line)
        group = extra[1] if extra else ""
        own.setdefault(group, [])
        if name is not None and name[1].replace("_", "-") == DISTRIBUTION:
            included.setdefault(group, []).extend((name[2] or "").split(","))
        elif name is not None:
            own[group].append(name[1])

    def gathered(group: str) -> list[str]:
        inner = [name for part in included.get(group, []) for name in gathered(part)]
        return list(dict.fromkeys([*own.get(group, []), *inner]))

    return {group: gathered(group) for group in own}

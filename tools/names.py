"""The names that the API pages document.

A page lists them in fences, the module on the first line and the names below::

    ```api solvers
    fixed_point Anderson
    ```
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "api"
# A name in code font, alone; a heading or a link is left as it is.
_CODE = re.compile(r"(?<![\[`\w])`(?P<name>[A-Za-z_][\w.]*\w)`(?![`\]])")
_BLOCK = re.compile(r"^[ ]*```.*?^[ ]*```$|^#[^\n]*$", flags=re.M | re.S)
_FENCE = re.compile(r"^```api (?P<module>[\w.]+)\n(?P<names>.*?)^```$", flags=re.M | re.S)


@dataclass(frozen=True)
class Listed:
    """One name of a module, on a page of the API."""

    page: str
    module: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


def listed() -> list[Listed]:
    """All names of all pages, in the order of reading."""
    return [
        Listed(page.name, found["module"], name)
        for page in sorted(PAGES.glob("*.md"))
        for found in _FENCE.finditer(page.read_text("utf-8"))
        for name in found["names"].split()
    ]


def replace_fences(markdown: str, write: Callable[[str, list[str]], str]) -> str:
    """``markdown`` with ``write(module, names)`` in the place of every fence."""
    return _FENCE.sub(lambda found: write(found["module"], found["names"].split()), markdown)


@functools.cache
def addresses() -> dict[str, str]:
    """By what a page may call a name: its full name, or a part of it that ends with the name.

    A lone word is taken for a name only if it begins like a class; what could mean two is left out.
    """
    found: dict[str, set[str]] = {}
    for entry in listed():
        parts = entry.path.split(".")
        for start in range(len(parts)):
            called = ".".join(parts[start:])
            if "." in called or (called[0].isupper() and not called.isupper()) or called == "DEQ":
                found.setdefault(called, set()).add(entry.path)
    return {called: paths.pop() for called, paths in found.items() if len(paths) == 1}


def link_names(markdown: str) -> str:
    """``markdown`` with a reference to the API where a public name stands in code font first."""
    seen: set[str] = set()

    def linked(found: re.Match[str]) -> str:
        path = addresses().get(found["name"])
        if path is None or path in seen:
            return found[0]
        seen.add(path)
        return f"[`{found['name']}`][{path}]"

    parts, end = [], 0
    for block in _BLOCK.finditer(markdown):
        parts += [_CODE.sub(linked, markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, _CODE.sub(linked, markdown[end:])])

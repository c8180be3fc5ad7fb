"""The names that the API pages document.

A page lists them in fences, the module on the first line and the names below::

    ```api solvers
    fixed_point Anderson
    ```
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# A name in code font, alone; a heading or a link is left as it is.
_CODE = re.compile(r"(?<![\[`\w])`(?P<name>[A-Za-z_][\w.]*\w)`(?![`\]])")
_BLOCK = re.compile(r"^[ ]*```.*?^[ ]*```$|^#[^\n]*$", flags=re.M | re.S)
FENCE = re.compile(r"^```api (?P<module>[\w.]+)\n(?P<names>.*?)^```$", flags=re.M | re.S)


class Listed(NamedTuple):
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
        for page in sorted((ROOT / "docs" / "api").glob("*.md"))
        for found in FENCE.finditer(page.read_text("utf-8"))
        for name in found["names"].split()
    ]


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

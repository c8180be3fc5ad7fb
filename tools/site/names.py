"""The names that the API pages document.

A page lists them in fences, the module on the first line and the names below::

    ```api solvers
    fixed_point Anderson
    ```
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "api"
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

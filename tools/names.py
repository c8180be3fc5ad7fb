"""The names that the API pages document.

A page lists them in fences, the module on the first line and the names below::

    ```api solvers
    fixed_point Anderson
    ```

Below each fence stands a table of the names, their arguments and first sentences, for readers of a checkout;
the site shows the whole documentation instead. ``python -m tools.names`` writes the tables.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# A name in code font, alone; a heading or a link is left as it is.
_CODE = re.compile(r"(?<![\[`\w])`(?P<name>[A-Za-z_][\w.]*\w)`(?![`\]])")
_BLOCK = re.compile(r"^[ ]*```.*?^[ ]*```$|^#[^\n]*$", flags=re.M | re.S)
FENCE = re.compile(
    r"^```api (?P<module>[\w.]+)\n(?P<names>.*?)^```$(?P<table>(?:\n\n\| name \|.*?(?=\n\n|\n?\Z))?)",
    flags=re.M | re.S,
)


class Listed(NamedTuple):
    """One name of a module, on a page of the API."""

    page: str
    module: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


def public_names(module: ModuleType) -> set[str]:
    """Return the names of ``__all__`` and those that are imported as themselves, ``import DEQ as DEQ``."""
    imports = ast.walk(ast.parse(inspect.getsource(module)))
    aliases = [a for node in imports if isinstance(node, ast.ImportFrom) for a in node.names]
    selves = {alias.name for alias in aliases if alias.name == alias.asname}
    return selves.union(getattr(module, "__all__", ()))


def tabulated(page: str) -> str:
    """Return the text of an API page with a current table below each of its fences."""

    def table(found: re.Match[str]) -> str:
        module, names = importlib.import_module(found["module"]), found["names"].split()
        fence = f"```api {found['module']}\n{found['names']}```"
        rows = "\n".join(_row(name, getattr(module, name)) for name in names)
        return f"{fence}\n\n| name | what it is |\n|---|---|\n{rows}"

    return FENCE.sub(table, page)


def _row(name: str, value: object) -> str:
    """Return a row with the arguments of a function or class, and the first sentence of its docstring."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return (
            f"| `{name}` | {_first_sentence(value)} |"  # the signature depends on Python's version
        )
    if not callable(value):
        return f"| `{name}` | a constant, `{type(value).__name__}` |"
    words = [_STARS.get(each.kind, "") + each.name for each in _parameters(value)]
    if len(words) > MOST_ARGUMENTS:
        words = [*words[:MOST_ARGUMENTS], "..."]
    return f"| `{name}({', '.join(words)})` | {_first_sentence(value)} |"


def _first_sentence(value: object) -> str:
    """Return the first sentence of a docstring as Markdown for a table."""
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    sentence = _SENTENCE_END.split(text, maxsplit=1)[0].removesuffix("::").removesuffix(":")
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", sentence).replace("``", "`").replace("|", "\\|")


def _parameters(value: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(value).parameters.values())
    except ValueError:  # a type of C
        return []


MOST_ARGUMENTS = 6  # that a table shows
_SENTENCE_END = re.compile(r"(?<=[\w)`\"][.:])\s(?=[A-Z`])")
_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


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


if __name__ == "__main__":
    for path in sorted((ROOT / "docs" / "api").glob("*.md")):
        path.write_text(tabulated(path.read_text("utf-8")), "utf-8")

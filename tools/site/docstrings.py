"""Docstrings as Markdown: a Griffe extension.

The docstrings have Google's sections and the inline marks of reStructuredText. Three of those mean
something else in Markdown and are rewritten when the sources are read:

- roles, ``:class:`Energy```, become links to the API page of the name where it has one, else code;
- ``::`` at the end of a paragraph, before an indented formula, becomes a colon;
- *Source*, *Shapes* and other one-line headings become bold words, and an *Example* a fence.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

from tools.site.names import listed

PACKAGES = ("solvers", "implicit_attn")
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?([^`]+)`")
_LITERAL = re.compile(r"(?<=\S)::[ \t]*$", flags=re.M)
_HEADING = re.compile(r"^(Sources?|Shapes?|Note|Limits): ", flags=re.M)
_ATTRIBUTES = re.compile(r"^Attributes:\n(?:[ ]{4,}[^\n]*\n?|\n)+", flags=re.M)
_SHARED = re.compile(
    r"^ {4}(?P<names>\w+(?:, \w+)+)(?P<text>:[^\n]*(?:\n {5,}[^\n]*)*)", flags=re.M
)
_EXAMPLE = re.compile(
    r"^Example(?P<what>, [^\n]*)?:\n(?P<code>(?:[ ]{4}[^\n]*\n?|\n)+)", flags=re.M
)


class Markdown(griffe.Extension):
    """Rewrites the docstrings of both packages once all of them are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self._documented = {entry.path for entry in listed()}

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        if pkg.path not in PACKAGES:
            return
        for entry in listed():
            if entry.module.partition(".")[0] == pkg.path:
                self._documented.add(_final_path(loader, entry.path))
        self._walk(pkg)

    def _walk(self, parent: griffe.Object) -> None:
        if parent.docstring is not None:
            parent.docstring.value = self._rewritten(parent, parent.docstring.value)
        for member in parent.members.values():
            if isinstance(member, griffe.Object):
                self._walk(member)

    def _rewritten(self, owner: griffe.Object, text: str) -> str:
        text = _ROLE.sub(lambda found: self._link(owner, found[1]), text)
        text = _LITERAL.sub(":", text)
        text = _EXAMPLE.sub(_example, text)
        text = _ATTRIBUTES.sub(_one_by_one, text)
        return _HEADING.sub(r"**\1:** ", text)

    def _link(self, owner: griffe.Object, target: str) -> str:
        """A reference that must resolve, where the target has a page; else the name as code."""
        shown = target.rpartition(".")[2] if target.startswith(PACKAGES) else target
        for path in _candidates(owner, target):
            if path in self._documented:
                return f"[`{shown}`][{path}]"
            parent, _, member = path.rpartition(".")
            if parent in self._documented:  # what a class inherits is documented with its base
                own = owner.modules_collection[parent].members
                return f"[`{shown}`][{path if member in own else parent}]"
        return f"`{target}`"


def _one_by_one(attributes: re.Match[str]) -> str:
    """An entry for each of the names in "a, b: text", where Griffe takes b for the type of a."""
    return _SHARED.sub(
        lambda found: "\n".join(
            f"    {name}{found['text']}" for name in found["names"].split(", ")
        ),
        attributes[0],
    )


def _candidates(owner: griffe.Object, target: str) -> list[str]:
    """The full names that ``target`` may stand for where ``owner`` is written."""
    found = [target] if target.startswith(PACKAGES) else []
    first, _, rest = target.partition(".")
    scope: griffe.Object | griffe.Alias | None = owner
    while scope is not None:
        if first in scope.members:
            member = scope.members[first]
            path = member.target_path if isinstance(member, griffe.Alias) else member.path
            found.append(f"{path}.{rest}" if rest else path)
        scope = scope.parent
    return found


def _final_path(loader: griffe.GriffeLoader, path: str) -> str:
    """Where the object is defined that ``path`` names."""
    member: Any = loader.modules_collection[path.partition(".")[0]]
    for part in path.split(".")[1:]:
        member = member.members[part]
        seen = 0
        while isinstance(member, griffe.Alias) and seen < 10:
            member, seen = loader.modules_collection[member.target_path], seen + 1
    return member.path


def _example(found: re.Match[str]) -> str:
    lines = [line[4:] for line in found["code"].rstrip().splitlines()]
    heading = f"**Example{found['what'] or ''}:**"
    return "\n".join([heading, "", "```pycon", *lines, "```", "", ""])

"""What the documentation site is built with, beside MkDocs: a hook and a Griffe extension.

The hook (``hooks:`` in mkdocs.yml) changes the pages:

- fences of names (:mod:`tools.names`) become a table of the names and their documentation;
- a comment ``include: PATH`` becomes the text of that file of the repository, its links mended;
- links to files of the repository outside of the site become their paths in code font;
- a public name in code font becomes a link to its documentation where the page has it first;
- formulas become MathML, which browsers draw without a script and without fonts of ours;
- the space between a number and its percent sign does not break.

The extension, :class:`Markdown`, changes docstrings. They have Google's sections and the inline marks of
reStructuredText, three of which mean something else in Markdown:

- roles, ``:class:`Energy```, become links to the API page of the name where it has one, else code;
- ``::`` at the end of a paragraph, before an indented formula, becomes a colon;
- *Source*, *Shapes* and other one-line headings become bold words, and an *Example* a fence.
"""

from __future__ import annotations

import functools
import html
import os
import re
from pathlib import PurePosixPath
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

from tools.names import FENCE, ROOT, link_names, listed

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
# Files of the repository that have a page of their own under another name.
PAGE_OF = {
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "measurements.md",
    "README.md": "index.md",
}
# What the converter to MathML does not know, in words that it does.
SPELLINGS = {
    r"\arg\min": r"\operatorname{arg\,min}",
    r"\lVert": r"\|",
    r"\rVert": r"\|",
    r"\lvert": "|",
    r"\rvert": "|",
    r"\dfrac": r"\frac",
}
_INCLUDE = re.compile(r"^<!-- include: (?P<path>[\w./-]+) -->$", flags=re.M)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_CODE = re.compile(r"(<(?:pre|code|math)\b.*?</(?:pre|code|math)>)", re.S)
_PERCENT = re.compile(r"(\d) %")
_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.S
)


# --- docstrings ----------------------------------------------------------------------------------


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
            parent.docstring.value = self._markdown(parent, parent.docstring.value)
        for member in parent.members.values():
            if isinstance(member, griffe.Object):
                self._walk(member)

    def _markdown(self, owner: griffe.Object, text: str) -> str:
        text = _LITERAL.sub(":", _ROLE.sub(lambda found: self._link(owner, found[1]), text))
        text = _ATTRIBUTES.sub(_one_by_one, _EXAMPLE.sub(_example, text))
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


# --- pages ---------------------------------------------------------------------------------------


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = PurePosixPath("docs") / PurePosixPath(page.file.src_uri).parent
    markdown = _INCLUDE.sub(lambda found: _included(found["path"], folder), markdown)
    markdown = _LINK.sub(lambda found: _link(found, folder), markdown)
    if not page.file.src_uri.startswith("api/"):
        markdown = link_names(markdown)
    return FENCE.sub(
        lambda found: _documentation(found["module"], found["names"].split()), markdown
    )


def on_page_content(html_text: str, **_: Any) -> str:
    html_text = _FORMULA.sub(_mathml, html_text)
    parts = _CODE.split(html_text)
    # A number keeps its percent sign beside it: cells of tables break anywhere else.
    parts[::2] = [_PERCENT.sub("\\1&nbsp;%", part) for part in parts[::2]]
    return "".join(parts)


def _included(path: str, folder: PurePosixPath) -> str:
    """A file of the repository as a part of a page in ``folder``, without its first heading."""
    text = re.sub(r"\A# .*\n", "", (ROOT / path).read_text("utf-8"))
    source = PurePosixPath(path).parent

    def moved(found: re.Match[str]) -> str:
        if "://" in found["target"]:
            return found[0]
        target = os.path.relpath(source / found["target"], folder)
        return f"[{found['text']}]({target}{found['anchor'] or ''})"

    return _LINK.sub(moved, text)


def _link(found: re.Match[str], folder: PurePosixPath) -> str:
    """A link that leaves docs/, to the page of that file or to none."""
    target = found["target"]
    if "://" in target or target.startswith("mailto:"):
        return found[0]
    path = os.path.normpath(folder / target)
    if path in PAGE_OF:
        page = os.path.relpath(PurePosixPath("docs") / PAGE_OF[path], folder)
        return f"[{found['text']}]({page}{found['anchor'] or ''})"
    if path.startswith("docs/"):
        return found[0]
    text = found["text"].strip("`")
    return f"`{path}`" if text == path or path.endswith(text) else f"{found['text']} (`{path}`)"


def _documentation(module: str, names: list[str]) -> str:
    rows = [f"| [`{name}`][{module}.{name}] | {_first_sentence(module, name)} |" for name in names]
    parts = []  # what mkdocstrings replaces by the documentation; of a module, its text without its parts
    for path in (f"{module}.{name}" for name in names):
        is_module = _loader().modules_collection[path].is_module
        parts.append(f"::: {path}" + "\n    options:\n      members: false\n" * is_module)
    if len(names) == 1:
        return f"{parts[0]}\n"
    return "\n".join(["| name | what it is |", "|---|---|", *rows, "", "\n\n".join(parts), ""])


@functools.cache
def _loader() -> griffe.GriffeLoader:
    """Both packages, read without importing them, as mkdocstrings reads them."""
    extensions = griffe.load_extensions(Markdown)
    loader = griffe.GriffeLoader(extensions=extensions, search_paths=[ROOT])
    for package in PACKAGES:
        loader.load(package)
    loader.resolve_aliases(external=False)
    return loader


def _first_sentence(module: str, name: str) -> str:
    found = _loader().modules_collection[f"{module}.{name}"]
    text = found.docstring.value if found.docstring is not None else ""
    line = " ".join(text.split("\n\n")[0].split())
    sentence = re.match(r".*?(?<!\.)[.:](?= [A-Z`]|$)|.*", line)
    line = (sentence[0] if sentence else line).rstrip(":")
    return line.replace("|", "\\|") if line else "-"


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found["tag"] == "div" else "inline"
    latex = html.unescape(found["latex"]).strip()
    for theirs, known in SPELLINGS.items():
        latex = latex.replace(theirs, known)
    written = convert(latex, display=display)
    if unknown := re.search(r">\s*(\\[A-Za-z]+)", written):
        raise PluginError(f"{unknown[1]} is not known to the converter, in the formula {latex}")
    return written

"""What happens to the pages while MkDocs builds them: a hook (``hooks:`` in mkdocs.yml).

- fences of names (:mod:`tools.site.names`) become a table of the names and their documentation;
- a comment ``include: PATH`` becomes the text of that file of the repository, its links mended;
- links to files of the repository outside of the site become their paths in code font;
- a public name in code font becomes a link to its documentation where the page has it first;
- formulas become MathML, which browsers draw without a script and without fonts of ours;
- the space between a number and its percent sign does not break.
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

from tools.site.docstrings import PACKAGES, Markdown
from tools.site.names import ROOT, link_names, replace_fences

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


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = PurePosixPath("docs") / PurePosixPath(page.file.src_uri).parent
    markdown = _INCLUDE.sub(lambda found: _included(found["path"], folder), markdown)
    markdown = _LINK.sub(lambda found: _link(found, folder), markdown)
    if not page.file.src_uri.startswith("api/"):
        markdown = link_names(markdown)
    return replace_fences(markdown, _documentation)


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
    parts = [_directive(f"{module}.{name}") for name in names]
    if len(names) == 1:
        return f"{parts[0]}\n"
    return "\n".join(["| name | what it is |", "|---|---|", *rows, "", "\n\n".join(parts), ""])


def _directive(path: str) -> str:
    """What mkdocstrings replaces by the documentation; of a module, its text without its parts."""
    found = _loader().modules_collection[path]
    alone = "\n    options:\n      members: false\n" if found.is_module else ""
    return f"::: {path}{alone}"


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

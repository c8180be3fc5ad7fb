"""The checks of the documentation site find what they look for."""

from __future__ import annotations

import inspect
import re
import zlib
from pathlib import Path

import pytest

from implicit_attn import load_pretrained
from tools.site.check import Page, check, documented_names, public_names, requests, wrong_links
from tools.site.names import link_names, listed, replace_fences

ROOT = Path(__file__).resolve().parents[2]


def write_site(folder: Path, **pages: str) -> dict[Path, Page]:
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, "utf-8")
    return {folder / f"{name}.html": Page(text) for name, text in pages.items()}


@pytest.mark.parametrize(
    ("link", "is_wrong"),
    [
        ("b.html", False),
        ("b.html#here", False),
        ("#top", False),
        ("https://example.org/x", False),
        ("c.html", True),
        ("b.html#nowhere", True),
        ("#nowhere", True),
    ],
)
def test_links_lead_to_pages_and_places(tmp_path: Path, link: str, is_wrong: bool) -> None:
    pages = write_site(tmp_path, a=f'<a id="top" href="{link}">', b='<h2 id="here">')
    assert bool(wrong_links(tmp_path, pages)) is is_wrong


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ('<script src="assets/x.js"></script>', False),
        ('<a href="https://example.org">a link is no request</a>', False),
        ('<script src="https://example.org/x.js"></script>', True),
        ('<link rel="stylesheet" href="//example.org/x.css">', True),
        ('<img src="https://example.org/badge.svg">', True),
        ('<p style="background: url(https://example.org/x.png)">', True),
    ],
)
def test_requests_to_elsewhere_are_found(tmp_path: Path, text: str, is_wrong: bool) -> None:
    assert bool(requests(tmp_path, write_site(tmp_path, a=text))) is is_wrong


def test_requests_of_style_sheets_are_found(tmp_path: Path) -> None:
    (tmp_path / "x.css").write_text('@import "https://example.org/y.css";', "utf-8")
    assert requests(tmp_path, {}) == ["x.css: fetches https://example.org/y.css"]


def test_a_name_that_is_on_no_page_is_found(tmp_path: Path) -> None:
    public = public_names(ROOT / "tests" / "test_public_names.py")
    assert {"solvers.fixed_point", "implicit_attn.DEQ"} <= public
    lines = "".join(f"{name} py:class 1 x -\n" for name in public - {"implicit_attn.DEQ"})
    header = b"# Sphinx inventory version 2\n# Project: x\n# Version: 0\n# zlib\n"
    (tmp_path / "objects.inv").write_bytes(header + zlib.compress(lines.encode()))
    write_site(tmp_path, index="<p>")
    assert check(tmp_path) == ["implicit_attn.DEQ is on no API page"]
    assert "solvers.fixed_point" in documented_names(tmp_path / "objects.inv")


def test_an_empty_site_is_no_success(tmp_path: Path) -> None:
    assert len(check(tmp_path)) == 1


def test_fences_of_names_are_replaced() -> None:
    text = "before\n\n```api solvers\nfixed_point\nAnderson\n```\n\nafter\n"
    replaced = replace_fences(text, lambda module, names: f"{module}: {', '.join(names)}")
    assert replaced == "before\n\nsolvers: fixed_point, Anderson\n\nafter\n"
    assert {"solvers.fixed_point", "implicit_attn.DEQ"} <= {entry.path for entry in listed()}


@pytest.mark.parametrize(
    ("text", "linked"),
    [
        ("`DEQ` and `DEQ`", "[`DEQ`][implicit_attn.DEQ] and `DEQ`"),
        ("`solvers.Anderson`", "[`solvers.Anderson`][solvers.Anderson]"),
        ("`energies.Hopfield`", "[`energies.Hopfield`][implicit_attn.energies.Hopfield]"),
        ("`load`, `mask`, `N`, `CG`", "`load`, `mask`, `N`, `CG`"),
        ("`Site` means two things", "`Site` means two things"),
        ("[`DEQ`](x.md)", "[`DEQ`](x.md)"),
        ("## `DEQ`\n\n`DEQ`", "## `DEQ`\n\n[`DEQ`][implicit_attn.DEQ]"),
        ("```python\n`DEQ`\n```", "```python\n`DEQ`\n```"),
    ],
)
def test_names_in_code_font_become_links(text: str, linked: str) -> None:
    assert link_names(text) == linked


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("See :func:`fixed_point`.", "See [`fixed_point`][solvers.fixed_points.fixed_point]."),
        ("See :class:`solvers.Anderson`.", "See [`Anderson`][solvers.Anderson]."),
        ("A :class:`Loop` is no public name.", "A `Loop` is no public name."),
        ("The step::\n\n    z - r", "The step:\n\n    z - r"),
        ("Source: a paper.", "**Source:** a paper."),
        ("Attributes:\n    a, b: both", "Attributes:\n    a: both\n    b: both"),
        ("Args:\n    a, b: both", "Args:\n    a, b: both"),
        ("Example:\n    >>> 1\n    1\n\nMore.", "**Example:**\n\n```pycon\n>>> 1\n1\n```\n\nMore."),
    ],
)
def test_docstrings_become_markdown(text: str, markdown: str) -> None:
    griffe = pytest.importorskip("griffe", reason="the extra docs is not installed")
    docstrings = pytest.importorskip("tools.site.docstrings")
    loader = griffe.GriffeLoader(
        extensions=griffe.load_extensions(docstrings.Markdown), search_paths=[ROOT]
    )
    package = loader.load("solvers")
    extension = docstrings.Markdown()
    extension.on_package(pkg=package, loader=loader)
    assert extension._rewritten(package["fixed_points"], text).strip() == markdown


@pytest.mark.parametrize(
    ("html", "kept_together"),
    [
        ("<td>97.8 %</td>", "<td>97.8&nbsp;%</td>"),
        ("<pre><code>5 %</code></pre> 5 %", "<pre><code>5 %</code></pre> 5&nbsp;%"),
        ("<code>7 % 2</code>", "<code>7 % 2</code>"),
        ('<a title="5">a % b</a>', '<a title="5">a % b</a>'),
    ],
)
def test_numbers_keep_their_percent_sign(html: str, kept_together: str) -> None:
    pages = pytest.importorskip("tools.site.pages", reason="the extra docs is not installed")
    assert pages.on_page_content(html) == kept_together


def test_what_is_returned_is_one_text() -> None:
    griffe = pytest.importorskip("griffe", reason="the extra docs is not installed")
    yaml = pytest.importorskip("yaml", reason="the extra docs is not installed")
    written = re.search(r"docstring_options: (\{.*\})", (ROOT / "mkdocs.yml").read_text("utf-8"))
    assert written is not None
    text = inspect.cleandoc(load_pretrained.__doc__ or "")
    assert len(text.partition("Returns:\n")[2].partition("\n\n")[0].splitlines()) > 1
    sections = griffe.parse_google(griffe.Docstring(text), **yaml.safe_load(written[1]))
    (returns,) = [each for each in sections if each.kind.value == "returns"]
    assert len(returns.value) == 1

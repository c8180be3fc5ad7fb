"""Checks of the built documentation site; ``python -m tools.site.check site`` prints what is wrong.

MkDocs itself checks the links of the Markdown pages. Here the pages are read as a browser gets them:

- every public name (``tests/test_public_names.py``) is in the inventory of the API pages;
- every link within the site leads to a page, and its anchor to a place on it;
- no page makes a browser fetch anything from elsewhere.
"""

from __future__ import annotations

import ast
import re
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

from tools.site.names import ROOT

# What a browser fetches by itself, by tag and attribute.
FETCHED = {
    ("script", "src"), ("link", "href"), ("img", "src"), ("img", "srcset"), ("iframe", "src"),
    ("source", "src"), ("source", "srcset"), ("video", "src"), ("audio", "src"), ("embed", "src"),
    ("object", "data"), ("image", "href"), ("use", "href"),
}  # fmt: skip
_ELSEWHERE = re.compile(r"^\s*(?:https?:)?//", flags=re.I)
_IN_STYLE = re.compile(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^)'\"\s]+)", flags=re.I)


class Page(HTMLParser):
    """The links, places and fetched addresses of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.fetched += [
            value
            for name, value in given.items()
            if (tag, name) in FETCHED and given.get("rel") != "canonical"
        ]
        self.fetched += _IN_STYLE.findall(given.get("style", ""))


def public_names(source: Path) -> set[str]:
    """The full names of ``PUBLIC`` in the test of the public names, read without importing it."""
    for node in ast.parse(source.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PUBLIC":
            modules: dict[str, str] = ast.literal_eval(node.value)
            return {f"{module}.{name}" for module in modules for name in modules[module].split()}
    raise ValueError(f"{source} has no table PUBLIC")


def documented_names(inventory: Path) -> set[str]:
    """The names in an inventory of Sphinx's format: four lines, then the rest compressed."""
    packed = inventory.read_bytes().split(b"\n", 4)[4]
    return {line.split(" ", 1)[0] for line in zlib.decompress(packed).decode().splitlines()}


def wrong_links(site: Path, pages: dict[Path, Page]) -> list[str]:
    found = []
    for path, page in pages.items():
        for link in page.links:
            if _ELSEWHERE.match(link) or link.startswith(("mailto:", "data:")):
                continue
            address, anchor = urldefrag(link)
            target = (path.parent / unquote(address)).resolve() if address else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{path.relative_to(site)}: {link} leads nowhere")
            elif anchor and target in pages and unquote(anchor) not in pages[target].places:
                found.append(f"{path.relative_to(site)}: {link} names no place on that page")
    return found


def requests(site: Path, pages: dict[Path, Page]) -> list[str]:
    found = [
        f"{path.relative_to(site)}: fetches {address}"
        for path, page in pages.items()
        for address in page.fetched
        if _ELSEWHERE.match(address)
    ]
    for style in site.rglob("*.css"):
        found += [
            f"{style.relative_to(site)}: fetches {address}"
            for address in _IN_STYLE.findall(style.read_text("utf-8"))
        ]
    return found


def check(site: Path) -> list[str]:
    """What is wrong with the site in that folder, a line each."""
    site = site.resolve()
    paths = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    if not paths:
        return [f"{site} holds no pages"]
    pages = {path: Page(path.read_text("utf-8")) for path in paths}
    public = public_names(ROOT / "tests" / "test_public_names.py")
    missing = sorted(public - documented_names(site / "objects.inv"))
    return [
        *(f"{name} is on no API page" for name in missing),
        *wrong_links(site, pages),
        *requests(site, pages),
    ]


def main() -> None:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site")
    problems = check(site)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        sys.exit(f"{len(problems)} problems in {site}")
    print(f"{site}: names, links and requests checked")


if __name__ == "__main__":
    main()

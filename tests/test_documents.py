"""The documents keep up with the code: their snippets and those of docstrings run, what they name exists."""

from __future__ import annotations

import doctest
import importlib
import json
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from implicit_attn import DEQ
from solvers import SolveWarning, Tolerance
from tools.names import listed, public_names, tabulated

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# Every page of the site; notebooks are run as a whole by their own test.
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in DOCS.rglob("*.md")
    if path.relative_to(DOCS).parts[0] != "notebooks"
)
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/RESULTS.md", *PAGES]
# Records of the past, which may name what is gone from the code.
RECORDS = {"docs/internal/defects.md", "docs/changelog.md"}
FOLDERS = "solvers|implicit_attn|tests|examples|benchmarks|docs"
PATH = re.compile(rf"(?<![\w/.])(?:{FOLDERS})(?:/[\w.-]+)+/?(?![\w*{{<])")
# What starts tests and programs by their paths, besides pages.
WORKERS = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "workers").glob("*.py")]
SCRIPTS = ["Makefile", ".ci/run", *sorted(WORKERS)]
DOTTED = re.compile(r"`((?:solvers|implicit_attn)(?:\.\w+)+)[`(]")


def text_of(document: str) -> str:
    return (ROOT / document).read_text("utf-8")


def snippets(document: str) -> list[str]:
    return re.findall(r"^```(?:python|py)\n(.*?)^```", text_of(document), flags=re.M | re.S)


def prose(document: str) -> list[str]:
    """The lines outside of fences."""
    return re.sub(r"^[ ]*```.*?^[ ]*```$", "", text_of(document), flags=re.M | re.S).splitlines()


def places(document: Path) -> set[str]:
    """The anchors of the headings, made as GitHub and the site make them."""
    found: set[str] = set()
    lines = prose(document.relative_to(ROOT).as_posix())
    included = re.findall(r"<!-- include: (\S+) -->", "\n".join(lines))
    for line in [*lines, *(line for name in included for line in prose(name))]:
        if heading := re.match(r"#+ (.*)", line):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
            found.add(re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-"))
    return found


def execute(block: str, name: str, scope: dict[str, Any]) -> None:
    logs = [logging.getLogger(package) for package in ("implicit_attn", "solvers")]
    levels = [log.level for log in logs]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SolveWarning)
        exec(compile(block, name, "exec"), scope)
    for log, level in zip(logs, levels, strict=True):  # a page shows how to set them
        log.setLevel(level)


def test_the_snippets_of_the_readme_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of reading."""
    torch.manual_seed(0)
    monkeypatch.chdir(ROOT)
    scope: dict[str, Any] = {}
    for number, block in enumerate(snippets("README.md")):
        execute(block, f"README.md, snippet {number + 1}", scope)
    assert scope


@pytest.mark.defect("D11")
@pytest.mark.parametrize(
    ("page", "number"), [(page, n) for page in PAGES for n in range(len(snippets(page)))]
)
def test_each_snippet_of_a_page_runs_alone(
    page: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is read in pieces: nothing is left over from another snippet."""
    torch.manual_seed(0)
    monkeypatch.chdir(ROOT)
    execute(snippets(page)[number], f"{page}, snippet {number + 1}", {})


@pytest.mark.defect("D11")
@pytest.mark.parametrize("scale", [10.0, 1.0, 0.3, 0.1, 0.01])
def test_the_energy_that_the_guide_recommends_is_solved(scale: float) -> None:
    """Whatever the size of the input, within the guide's tolerance and budget."""
    recipe = next(block for block in snippets("docs/guide/energies.md") if "bound=" in block)
    for seed in range(3):
        torch.manual_seed(seed)
        scope: dict[str, Any] = {}
        execute(recipe, "docs/guide/energies.md", scope)
        layer = DEQ(scope["energy"], tolerance=Tolerance(rtol=1e-3), max_steps=60)
        with torch.no_grad():
            solution = layer.solve(scale * torch.randn(16, 16, 64), on_failure="ignore")
        assert solution.converged.all()
        assert solution.evaluations.max() <= 20


@pytest.mark.parametrize(
    "document", [name for name in [*DOCUMENTS, *SCRIPTS] if name not in RECORDS]
)
def test_the_files_it_names_exist(document: str) -> None:
    named = {match.rstrip("/.") for match in PATH.findall(text_of(document))}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_its_links_lead_somewhere(document: str) -> None:
    """To a file, and to a heading of it."""
    folder, broken = (ROOT / document).parent, []
    for link in re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(document))):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (folder / path).resolve() if path else ROOT / document
        headings = anchor and target.suffix == ".md"
        if not target.exists() or (headings and anchor not in places(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_its_lines_of_prose_are_short(document: str) -> None:
    """But for tables, pictures and formulas; where links lead does not count."""
    lines = [re.sub(r"\]\([^)]*\)", "]", line) for line in prose(document)]
    assert [
        line for line in lines if len(line) > 120 and not re.match(r"\s*(\||!\[|\$\$)", line)
    ] == []


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 110


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda page: page.stem)
def test_the_tables_of_an_api_page_are_current(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text == tabulated(text), "run python -m tools.names"


def test_every_public_name_is_on_one_page_of_the_api() -> None:
    """Of the packages that the pages of the API are about."""
    pages: dict[tuple[int, str], str] = {}  # two names of one thing are two names
    packages = {entry.module: importlib.import_module(entry.module) for entry in listed()}
    for entry in listed():
        key = (id(getattr(packages[entry.module], entry.name)), entry.name)
        assert key not in pages, f"{entry.path} is on {entry.page} and on {pages[key]}"
        pages[key] = entry.page
    missing = [
        f"{path}.{name}"
        for path, module in packages.items()
        for name in public_names(module)
        if not isinstance(getattr(module, name), ModuleType)
        and (id(getattr(module, name)), name) not in pages
    ]
    assert missing == []


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name not in RECORDS])
def test_the_names_in_it_can_be_imported(document: str) -> None:
    missing = []
    for dotted in set(DOTTED.findall(text_of(document))):
        parts, found = dotted.split("."), None
        for depth in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:depth]))
            except ModuleNotFoundError:
                continue
            for name in parts[depth:]:
                found = getattr(found, name, None)
            break
        if found is None:
            missing.append(dotted)
    assert missing == []


def test_the_gallery_shows_every_experiment_and_every_picture() -> None:
    """On one of its two pages."""
    text = text_of("docs/gallery.md") + text_of("docs/gallery-more.md")
    programs = {
        path.name
        for path in ROOT.glob("examples/*.py")
        if '__name__ == "__main__"' in path.read_text("utf-8")
    }
    assert programs <= set(re.findall(r"examples/(\w+\.py)", text))
    pictures = {path.name for path in (ROOT / "docs/gallery").glob("*.png")}
    assert set(re.findall(r"\]\(gallery/([\w-]+\.png)\)", text)) == pictures


# --- docstrings ------------------------------------------------------------------------------------

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules_with_examples() -> list[str]:
    paths = [path for name in ("solvers", "implicit_attn") for path in (ROOT / name).rglob("*.py")]
    found = [path for path in sorted(paths) if ">>> " in path.read_text("utf-8")]
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in found]
    return [".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module_run(name: str) -> None:
    """With the names of their module, torch and nn at hand."""
    module = importlib.import_module(name)
    scope = {**vars(module), "torch": torch, "nn": nn}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=FLAGS)
    report: list[str] = []
    for test in finder.find(module, globs=scope):
        torch.manual_seed(0)
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
    assert runner.tries > 0


def of_solvers(table: str, key: str) -> Callable[[Any], list[str]]:
    """The numbers ``key`` of four solvers, from the tables of a picture."""

    def read(tables: Any) -> list[str]:
        rows = {row.get("solver") or row["method"]: row for row in tables[table]}
        return [f"{rows[n][key]:.0f}" for n in ("forward", "L-BFGS", "Anderson", "Broyden")]

    return read


def of_layer(name: str) -> Callable[[Any], list[str]]:
    def read(tables: Any) -> list[str]:
        (row,) = (row for row in tables["summary"] if row["layer"] == name)
        return ["{accuracy:.1f} ({least:.1f} to {most:.1f})".format(**row)]

    return read


# A picture, the first cell of a row of docs/models.md, and the cells that follow.
CLAIMS: list[tuple[str, str, Callable[[Any], list[str]]]] = [
    ("equilibrium-extrapolation", "to the test accuracy", of_solvers("reach", "to_accuracy")),
    ("equilibrium-extrapolation", "to forward iteration's", of_solvers("reach", "to_loss")),
    ("equilibrium-convergence", "to a residual and an", of_solvers("costs", "evaluations")),
    ("gallery/own-energy", "*no layer*", of_layer("no layer")),
    ("gallery/own-energy", "your own energy", of_layer("your own energy")),
    ("gallery/own-energy", "*`nn.Trans", of_layer("nn.TransformerEncoderLayer")),
    ("gallery/own-energy", "`Equil", of_layer("EquilibriumBlock")),
]


@pytest.mark.parametrize(("picture", "first", "read"), CLAIMS)
def test_a_table_has_the_numbers_of_its_picture(
    picture: str, first: str, read: Callable[[Any], list[str]]
) -> None:
    """examples/runner.py writes the tables into the picture that it draws of them."""
    with Image.open(DOCS / f"{picture}.png") as image:
        expected = read(json.loads(str(image.info["Comment"])))
    rows = [line.strip("| ").split(" | ") for line in text_of("docs/models.md").splitlines()]
    assert expected in [row[1 : 1 + len(expected)] for row in rows if row[0].startswith(first)]


def test_no_picture_stands_there_twice() -> None:
    seen: dict[bytes, Path] = {}
    for path in sorted(DOCS.rglob("*.png")):
        with Image.open(path) as image:
            pixels = image.convert("RGB").tobytes()
        assert pixels not in seen, f"{path} is {seen[pixels]}"
        seen[pixels] = path


def test_each_defect_has_a_number_and_a_test() -> None:
    """The page lists A1 to A21, B1 to B6, ... in order; tests are marked with these names and no others.

    What is gone from the code needs no test.
    """
    lines = {"A": 21, "B": 6, "C": 8, "D": 13, "E": 9}
    rows = re.findall(
        r"^\| ([A-E]\d+) \|.*\| (.*) \|$", text_of("docs/internal/defects.md"), flags=re.M
    )
    stated, gone = [name for name, _ in rows], {name for name, now in rows if now[:5] == "Gone:"}
    assert stated == [f"{part}{k + 1}" for part, count in lines.items() for k in range(count)]
    marks = [
        re.findall(r'"(\w+)"', arguments)
        for file in (ROOT / "tests").rglob("test_*.py")
        for arguments in re.findall(r"\bmark\.defect\(([^)]*)\)", file.read_text("utf-8"))
    ]
    assert {name for names in marks for name in names} == set(stated) - gone

"""The documents keep up with the code: their snippets run, the files and names in them exist."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_attn import DEQ
from implicit_attn.studies.command import STUDIES
from implicit_attn.studies.experiments.registry import EXPERIMENTS
from solvers import SolveWarning, Tolerance

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "docs/guide.md",
    "docs/choosing.md",
    "docs/spins.md",
    "docs/scaling.md",
    "docs/migrating/torchdeq.md",
    "docs/migrating/hflayers.md",
    "docs/migrating/hyper-set.md",
]  # whose snippets run one by one
LISTS = ["docs/gallery.md", "docs/systems.md", "docs/results.md", "benchmarks/RESULTS.md"]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *PAGES, *LISTS]
FOLDERS = "solvers|implicit_attn|tests|examples|benchmarks|docs"
PATH = re.compile(rf"(?<![\w/.])(?:{FOLDERS})(?:/[\w.-]+)+/?(?![\w*{{<])")
DOTTED = re.compile(r"`((?:solvers|implicit_attn)(?:\.\w+)+)[`(]")


def text_of(document: str) -> str:
    return (ROOT / document).read_text("utf-8")


def snippets(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text_of(document), flags=re.M | re.S)


def execute(block: str, name: str, scope: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SolveWarning)
        exec(compile(block, name, "exec"), scope)


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
    recipe = next(block for block in snippets("docs/guide.md") if "bound=" in block)
    for seed in range(3):
        torch.manual_seed(seed)
        scope: dict[str, Any] = {}
        execute(recipe, "docs/guide.md", scope)
        layer = DEQ(scope["energy"], tolerance=Tolerance(rtol=1e-3), max_steps=60)
        with torch.no_grad():
            solution = layer.solve(scale * torch.randn(16, 16, 64), on_failure="ignore")
        assert solution.converged.all()
        assert solution.evaluations.max() <= 20


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_files_it_names_exist(document: str) -> None:
    named = {match.rstrip("/.") for match in PATH.findall(text_of(document))}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_its_links_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(document))
    inside = [link for link in links if not link.startswith(("http://", "https://"))]
    folder = (ROOT / document).parent
    assert [link for link in inside if not (folder / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
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
    text = text_of("docs/gallery.md")
    commands = set(re.findall(r"python -m implicit_attn\.studies ([\w-]+)", text))
    assert set(EXPERIMENTS) <= commands
    pictures = {path.name for path in (ROOT / "docs/gallery").glob("*.png")}
    assert set(re.findall(r"\(gallery/([\w-]+\.png)\)", text)) == pictures


@pytest.mark.parametrize("document", DOCUMENTS)
def test_its_commands_exist(document: str) -> None:
    named = set(re.findall(r"python -m implicit_attn\.studies ([a-z][\w-]+)", text_of(document)))
    assert named <= {*EXPERIMENTS, *STUDIES, "trade-off"}

"""The documents keep up with the code: their snippets run, the files and names in them exist."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from solvers import SolveWarning

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "docs/guide.md", "docs/results.md", "benchmarks/RESULTS.md"),
]
FOLDERS = "solvers|implicit_attn|tests|examples|benchmarks|docs"
PATH = re.compile(rf"(?<![\w/.])(?:{FOLDERS})(?:/[\w.-]+)+/?(?![\w*{{<])")
DOTTED = re.compile(r"`((?:solvers|implicit_attn)(?:\.\w+)+)[`(]")


def text_of(document: str) -> str:
    return (ROOT / document).read_text("utf-8")


def snippets(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text_of(document), flags=re.M | re.S)


def test_the_snippets_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of reading; those of the guide go on from the README's, as it says."""
    torch.manual_seed(0)
    monkeypatch.chdir(ROOT)
    scope: dict[str, Any] = {}
    for document in ("README.md", "docs/guide.md"):
        blocks = snippets(document)
        assert blocks
        for number, block in enumerate(blocks):
            scope["mask"] = torch.ones(8, 16, dtype=torch.bool)
            with warnings.catch_warnings():
                warnings.simplefilter("error", SolveWarning)
                exec(compile(block, f"{document}, snippet {number + 1}", "exec"), scope)


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

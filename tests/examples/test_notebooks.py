"""The notebooks run from top to bottom, and their pages show the code that they have now."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

for package in ("matplotlib", "sklearn", "safetensors"):
    pytest.importorskip(package, reason="the notebooks need the extra [examples]")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "notebooks"


def _builder() -> Any:
    found = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


BUILDER = _builder()
NOTEBOOKS = BUILDER.notebooks()
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@each_notebook
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with torch.random.fork_rng(devices=[]):
        page = BUILDER.build(path, tmp_path)
    pictures = re.findall(r"!\[.+\]\((.+)\)", page)
    assert pictures and {file.name for file in tmp_path.iterdir()} == set(pictures)
    assert blocks(page, "text")
    shown = path.with_suffix(".md").read_text(encoding="utf-8")
    assert re.findall(r"!\[.+\]\((.+)\)", shown) == pictures, "run make notebooks"


@each_notebook
def test_its_page_is_of_this_code(path: Path) -> None:
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    code = [cell.source + "\n" for cell in BUILDER.read_cells(path) if not cell.text]
    assert blocks(page, "python") == code, "run make notebooks"
    for cell in BUILDER.read_cells(path):
        assert not cell.text or cell.source in page, "run make notebooks"
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page):
        assert (FOLDER / link).exists(), link
    for picture in re.findall(r"!\[.+\]\((.+)\)", page):
        assert (FOLDER / picture).stat().st_size < 200_000


def test_the_index_has_every_notebook() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    titles = {path: BUILDER.read_cells(path)[0].source.split("\n")[0] for path in NOTEBOOKS}
    assert all(
        f"[{title.removeprefix('# ')}]({path.stem}.md)" in index for path, title in titles.items()
    )

"""Every line of ``docs/defects.md`` has a regression test, marked ``@pytest.mark.defect("A1")``."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINES = {"A": 19, "B": 6, "C": 8, "D": 13, "E": 8}
MARKER = re.compile(r"\bmark\.defect\(([^)]*)\)")


def marked() -> Counter[str]:
    """The lines that tests name, and how often."""
    names: Counter[str] = Counter()
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if file != Path(__file__):
            for arguments in MARKER.findall(file.read_text("utf-8")):
                names.update(re.findall(r'"(\w+)"', arguments))
    return names


def listed() -> list[str]:
    """The lines of the document, in its order."""
    text = (ROOT / "docs/defects.md").read_text("utf-8")
    return re.findall(r"^\| ([A-E]\d+) \|", text, flags=re.M)


def test_the_document_lists_every_line_once() -> None:
    assert listed() == [f"{part}{k + 1}" for part, count in LINES.items() for k in range(count)]


@pytest.mark.parametrize(
    "line", [f"{p}{k + 1}" for p, count in LINES.items() for k in range(count)]
)
def test_a_test_guards_the_line(line: str) -> None:
    assert marked()[line] > 0


def test_markers_name_lines_of_the_document() -> None:
    assert sorted(set(marked()) - set(listed())) == []

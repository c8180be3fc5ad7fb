"""Every file in examples/ runs, so that none drifts from the library."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# How to run each example in a few seconds; {out} is an empty folder.
ARGUMENTS: dict[str, list[str]] = {"wrap_your_energy.py": ["--steps", "40"]}
ELSEWHERE = {"scale_out.py", "runner.py"}  # run by tests of their own


def words(name: str, out: Path) -> list[str]:
    return [argument.replace("{out}", str(out)) for argument in ARGUMENTS[name]]


def run(name: str, out: Path) -> str:
    arguments = words(name, out)
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", f"examples/{name}", *arguments],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_example_is_listed() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(ARGUMENTS) | ELSEWHERE


def test_wrap_your_energy(tmp_path: Path) -> None:
    """The filters learn: the error ends well below that of the noisy signals themselves."""
    output = run("wrap_your_energy.py", tmp_path)
    lines = re.findall(
        r"step +(\d+) +error ([\d.]+) \(noisy ([\d.]+)\) +converged (\d+) % +"
        r"energy ([\d.]+) -> ([\d.]+)",
        output,
    )
    rows = [[float(value) for value in line] for line in lines]
    assert len(rows) >= 5, output
    errors = [row[1] for row in rows]
    assert errors[-1] < 0.25 * errors[0]
    assert errors[-1] < 0.7 * rows[-1][2]
    for _, _, _, converged, before, after in rows:
        assert converged == 100
        assert after < before


def test_examples_are_short_and_public() -> None:
    """Scripts that a person reads top to bottom; nothing private is imported."""
    for path in (ROOT / "examples").glob("*.py"):
        text = path.read_text()
        assert text.startswith('"""'), path
        assert len(text.splitlines()) <= 300, path
        for line in text.splitlines():
            if re.match(r"\s*(from|import) (implicit_attn|solvers)", line):
                assert not re.search(r"[. ]_\w", line), f"{path.name}: {line}"

"""The examples to be read: what is in examples/ is listed, short and public, and runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_wrap_your_energy() -> None:
    """The filters learn: the error ends well below that of the noisy signals themselves."""
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "examples/wrap_your_energy.py", "--steps", "40"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    lines = re.findall(
        r"step +(\d+) +error ([\d.]+) \(noisy ([\d.]+)\) +converged (\d+) % +"
        r"energy ([\d.]+) -> ([\d.]+)",
        result.stdout,
    )
    rows = [[float(value) for value in line] for line in lines]
    assert len(rows) >= 5, result.stdout
    assert rows[-1][1] < 0.25 * rows[0][1] and rows[-1][1] < 0.7 * rows[-1][2]
    for _, _, _, converged, before, after in rows:
        assert converged == 100 and after < before


def test_examples_are_listed_short_and_public() -> None:
    """Scripts that a person reads top to bottom; nothing private is imported."""
    paths = list((ROOT / "examples").glob("*.py"))
    assert {path.name for path in paths} == {"wrap_your_energy.py", "scale_out.py", "runner.py"}
    for path in paths:
        text = path.read_text()
        assert text.startswith('"""') and len(text.splitlines()) <= 300, path
        for line in text.splitlines():
            if re.match(r"\s*(from|import) (implicit_attn|solvers)", line):
                assert not re.search(r"[. ]_\w", line), f"{path.name}: {line}"

"""``benchmarks/gpu_all.sh``, run with a stand-in for Python that only notes how it was called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """#!/usr/bin/env bash
echo "$PYTHONPATH | $*" >>"$CALLS"
"""


@pytest.mark.defect("E8")
@pytest.mark.skipif(sys.platform != "linux", reason="the script is for bash with coreutils")
def test_it_adds_to_the_path_and_takes_every_step(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    calls = tmp_path / "calls"
    environment = os.environ | {
        "PYTHON": str(python),
        "CALLS": str(calls),
        "OUT": str(tmp_path / "out"),
        "PYTHONPATH": "/somebody/elses",
    }
    script = ROOT / "benchmarks/gpu_all.sh"
    result = subprocess.run(
        ["bash", str(script)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    paths, commands = zip(
        *(line.split(" | ", 1) for line in calls.read_text().splitlines()), strict=True
    )
    assert set(paths) == {f"{ROOT}:/somebody/elses"}
    wanted = ("-m pytest", "gpu.py race", "gpu.py layers", "bisoftmax.py peers")
    assert [name for name in wanted if not any(name in command for command in commands)] == []

"""Scripts that are killed at random moments and resumed lose nothing; KILLS=20 kills more often."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from workers.kills import SCRIPTS, kill_often

# Of classify, interruptions are tested in tests/programs/test_classify.py; KILLS=20 kills both.
NAMES = SCRIPTS if "KILLS" in os.environ else ["sudoku"]

for module in ("sklearn", "safetensors", "matplotlib", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="the examples need the extra [examples]")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
@pytest.mark.parametrize("name", NAMES)
def test_kills_lose_nothing(name: str, tmp_path: Path) -> None:
    counts = kill_often(name, int(os.environ.get("KILLS", "1")), seed=0, folder=tmp_path)
    assert counts.lost == 0
    for folder in tmp_path.iterdir():
        assert not [path for path in folder.iterdir() if path.suffix in (".part", ".lock")]

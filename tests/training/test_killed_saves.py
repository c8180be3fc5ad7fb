"""A kill within a save leaves a file behind, which the next run removes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases.training import Recorder, toy_data
from implicit_attn.training import Recipe, Training

for module in ("safetensors", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="needs the extra [training]")
# A save that is killed when the whole file is written and not yet in its place.
SAVER = """
import os, sys, time
from torch import nn
from implicit_attn.checkpoint import save_checkpoint
def replace(*_):
    print("ready", flush=True)
    time.sleep(600)
os.replace = replace
save_checkpoint(sys.argv[1], nn.Linear(2, 2))
"""


@pytest.mark.defect("B3")
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_run_sweeps_what_a_kill_within_a_save_left(tmp_path: Path) -> None:
    path = tmp_path / "run" / "checkpoint.safetensors"
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert saver.stdout is not None
    assert saver.stdout.readline() == "ready\n"
    saver.send_signal(signal.SIGKILL)
    saver.communicate(timeout=60)
    assert len(list(path.parent.glob("*.part"))) == 1
    torch.manual_seed(0)
    Training(Recorder(), toy_data(), Recipe(1, 5, 0.1), path, {"some": 1}).run()
    assert [each.name for each in path.parent.iterdir()] == [path.name]

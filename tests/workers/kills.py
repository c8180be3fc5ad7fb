"""Kill a training script at random moments, resume it, and compare its end with an uninterrupted run.

    PYTHONPATH=.:tests python tests/workers/kills.py classify --kills 20
    PYTHONPATH=.:tests python tests/workers/kills.py sudoku --kills 20 --seed 1

The script is killed (SIGKILL) at moments drawn from its start to a little beyond its end, and started
again with --resume as soon as there is a checkpoint. A run that was killed as often as wanted, or that
came to its end, must have left the same weights and tables as the uninterrupted one, bit for bit but
for the seconds; no kill may cost a step that a checkpoint held. It prints what it counted.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from implicit_attn.checkpoint import read_progress
from implicit_attn.optional import require

ROOT = Path(__file__).resolve().parents[2]
# Small trainings; each saves often, and takes a few seconds.
SCRIPTS: dict[str, list[str]] = {
    "classify": [
        "--limit", "96", "--epochs", "6", "--batch", "16", "--dim", "16", "--memories", "16",
        "--heads", "2",
    ],
    "sudoku": [
        "--source", "generated", "--train", "64", "--test", "8", "--epochs", "3", "--dim", "16",
        "--heads", "2", "--width", "32", "--iterations", "4", "--batch", "4", "--save-every", "3",
        "--log-every", "2",
    ],
}  # fmt: skip


@dataclass
class Counts:
    kills: int = 0
    resumed: int = 0  # of the starts, those from a checkpoint
    during: int = 0  # of the kills, those after the first checkpoint and before the end of training
    left: int = 0  # unfinished files and locks that a kill left behind, all swept later
    lost: int = 0  # steps of a checkpoint gone, a start refused, or a difference at the end
    runs: int = 0


def launch(name: str, out: Path, *flags: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        f"implicit_attn.programs.{name}",
        *SCRIPTS[name],
        "--out",
        str(out),
        *flags,
    ]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip


def progress(out: Path) -> tuple[int, int]:
    path = out / "checkpoint.safetensors"
    found = read_progress(path) if path.exists() else {"epoch": 0, "batch": 0}
    return found["epoch"], found["batch"]


def result(out: Path) -> dict[str, Any]:
    """Weights, optimizer, history and tables of a finished run, but for the seconds."""
    load = require("safetensors.torch", extra="training").load_file
    found: dict[str, Any] = {}
    for path in sorted(out.iterdir()):
        if path.suffix == ".safetensors":
            for key, value in load(str(path)).items():
                # Numbers drawn after the last checkpoint are not a part of the result.
                if key != "random.torch":
                    found[f"{path.name}:{key}"] = (str(value.dtype), value.numpy().tobytes())
            rows = read_progress(path)["history"]
            found[f"{path.name}:history"] = [dict(row, seconds=0) for row in rows]
        elif path.suffix == ".csv":
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            found[path.name] = [dict(row, seconds=0) for row in rows]
        else:
            found[path.name] = None
    return found


def finish(name: str, out: Path, *flags: str) -> tuple[int, str]:
    process = launch(name, out, *flags)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output


def run_killed(
    name: str, out: Path, most: int, length: float, draw: random.Random, n: Counts
) -> None:
    """One training, killed at most ``most`` times, then run to its end."""
    n.runs += 1
    before = (0, 0)
    for _ in range(most):
        resume = (out / "checkpoint.safetensors").exists()
        n.resumed += resume
        process = launch(name, out, *(["--resume"] if resume else []))
        try:
            output, _ = process.communicate(timeout=draw.uniform(0, 1.1 * length))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate(timeout=60)
            n.kills += 1
        else:
            if process.returncode != 0:
                n.lost += 1
                print(output)
            return
        n.left += sum(path.suffix == ".part" for path in out.glob("*"))
        after = progress(out)
        n.during += (out / "checkpoint.safetensors").exists() and not (out / "report.png").exists()
        if after < before:
            n.lost += 1
            print(f"{before} was saved, {after} was found")
        before = after
    resume = (out / "checkpoint.safetensors").exists()
    code, output = finish(name, out, *(["--resume"] if resume else []))
    if code != 0:
        n.lost += 1
        print(output)


def kill_often(name: str, kills: int, seed: int, folder: Path) -> Counts:
    draw, n = random.Random(seed), Counts()
    start = time.perf_counter()
    code, output = finish(name, folder / "whole")
    assert code == 0, output
    length = time.perf_counter() - start
    expected = result(folder / "whole")
    while n.kills < kills:
        out = folder / f"run-{n.runs}"
        run_killed(name, out, kills - n.kills, length, draw, n)
        found = result(out)
        differing = [
            key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)
        ]
        if differing or found.keys() != expected.keys():
            n.lost += 1
            print(f"{out} differs in {sorted(differing)}")
    return n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("script", choices=sorted(SCRIPTS))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = kill_often(options.script, options.kills, options.seed, Path(folder))
    print(f"{options.script}: {counts}")
    raise SystemExit(counts.lost > 0)


if __name__ == "__main__":
    main()

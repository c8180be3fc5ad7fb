"""Trainings by ``implicit-attn train`` as processes of their own, several at a time, resumed; no program."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Run:
    """A training: a row of a table, with a seed and the words behind ``implicit-attn train``.

    Words KEY=VALUE are those of the program's ``--options``.
    """

    row: str
    seed: int
    words: tuple[str, ...]
    size: str = ""

    def folder(self, out: Path) -> Path:
        name = f"{self.size}-{self.row}".strip("-").replace(", ", "-").replace(" ", "-")
        return out / f"{name}-{self.seed}"

    @property
    def command(self) -> list[str]:
        options = [word for word in self.words if "=" in word]
        flags = [word for word in self.words if "=" not in word]
        return [*flags, *(["--options", *options] if options else []), "--seed", str(self.seed)]


def perform(runs: Sequence[Run], out: Path, workers: int, train: bool = True) -> list[Run]:
    """Train what is missing, ``workers`` processes of one thread at a time; the runs that are done.

    Raises:
        SystemExit: a run of that name with other words is in the folder, or no run is done.
    """
    out.mkdir(parents=True, exist_ok=True)
    for run in runs:
        kept = run.folder(out) / "words.json"
        if kept.exists() and json.loads(kept.read_text()) != run.command:
            raise SystemExit(f"{kept} is of a run with other options: choose another --out")
    start = time.perf_counter()
    pool = ThreadPoolExecutor(workers)
    try:
        missing = [run for run in runs if not (run.folder(out) / WEIGHTS).exists()]
        for told in pool.map(lambda run: _train(run, out), missing if train else []):
            print(f"{time.perf_counter() - start:6.0f} s  {told}", file=sys.stderr, flush=True)
    finally:  # after Ctrl-C, which the processes have received too, they save where they are
        pool.shutdown(cancel_futures=True)
    done = [run for run in runs if (run.folder(out) / WEIGHTS).exists()]
    if not done:
        raise SystemExit("no run of this table is done")
    return done


def _train(run: Run, out: Path) -> str:
    """Start a training, or go on with it; how it has ended, with its last words if it failed."""
    place = run.folder(out)
    place.mkdir(parents=True, exist_ok=True)
    (place / "words.json").write_text(json.dumps(run.command))
    words = [sys.executable, "-m", "implicit_attn", "train", *run.command]
    known = (place / "checkpoint.safetensors").exists()  # a new folder holds words and log alone
    words += ["--out", str(place), "--accelerator", "cpu", "--resume" if known else "--overwrite"]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    with (place / "log.txt").open("ab") as log:
        code = subprocess.run(
            words, stdout=log, stderr=log, env=environment, check=False
        ).returncode
    last = (place / "log.txt").read_text(errors="replace").strip().split("\n")[-1]
    return f"{place.name}: " + (f"ended with {code}: {last}" if code else "done")


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows of a training's table, numbers as numbers."""
    with (folder / "checkpoint.csv").open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]

"""Trainings by an example as processes of their own, several at a time, resumed where they stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from implicit_attn.command_line import Parser, command, folder, make_folder, mistakes, whole

ROOT = Path(__file__).resolve().parent.parent.parent
TRAIN = (sys.executable, "-m", "implicit_attn", "train")
WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Run:
    """A training: a row of a table at a size, with a seed; ``words`` are options of the program.

    ``program`` is one of ``implicit-attn train``; words KEY=VALUE are those of its ``--options``.
    """

    size: str
    row: str
    seed: int
    words: tuple[str, ...]
    program: str

    @property
    def command(self) -> list[str]:
        """What stands behind ``implicit-attn train``, without seed and folder."""
        options = [word for word in self.words if "=" in word]
        flags = [word for word in self.words if "=" not in word]
        return [self.program, *flags, *(["--options", *options] if options else [])]

    @property
    def folder(self) -> str:
        return f"{self.size}-{self.row.replace(', ', '-').replace(' ', '-')}-{self.seed}"


def add_run_options(parser: Parser, out: Path) -> None:
    """Add how the runs are carried out, and the folder ``out`` where they are kept."""
    add = parser.add_argument
    add("--workers", type=whole(1, 256), default=2, help="runs at a time, each of one thread")
    add("--out", type=folder, default=out, help=f"folder of the runs (default {out})")
    add("--table", action="store_true", help="only show what is done")


def run_command(
    parser: Parser,
    arguments: Sequence[str] | None,
    plan: Callable[[Any], list[Run]],
    show: Callable[[Any, list[Run]], None],
) -> None:
    """What ``main`` of a comparison does: read the options, train what is missing, show what is done."""
    with command(parser):
        options = parser.parse_args(arguments)
        perform(parser, options, plan(options), show)


def perform(
    parser: Parser, options: Any, runs: Sequence[Run], show: Callable[[Any, list[Run]], None]
) -> None:
    """Train what is missing of ``runs`` and show what is done."""
    with mistakes("--out"):
        make_folder(options.out)
        done = [run for run in runs if is_done(run, options.out)]
    failed: list[Run] = []
    if not options.table:
        tell = partial(told, options.out, time.perf_counter())
        failed = complete(runs, options.out, options.workers, tell)
        done = [run for run in runs if is_done(run, options.out)]
    if done:
        show(options, done)
    else:
        print("no run of this table is done")
    if failed:
        parser.leave(1, f"{len(failed)} runs failed; the same command tries them again")


def told(folder: Path, start: float, run: Run, seconds: float, code: int) -> None:
    """A line on the standard error for a run that has ended, with its last words if it failed."""
    end = "done"
    if code:
        said = (folder / run.folder / "log.txt").read_text(errors="replace").split("\n")
        end = f"ended with {code}: " + next((line for line in said[::-1] if line.strip()), "")
    now = time.perf_counter() - start
    print(f"{now:6.0f} s  {run.folder}: {end}, {seconds:.0f} s", file=sys.stderr, flush=True)


def is_done(run: Run, folder: Path) -> bool:
    """Whether the run has ended, with the same words as now.

    Raises:
        ValueError: a run of that name, with other words, is in the folder.
    """
    kept = folder / run.folder / "words.json"
    if kept.exists() and json.loads(kept.read_text()) != list(run.words):
        raise ValueError(
            f"{kept} is of a run with other options: choose another folder, or remove that one"
        )
    return (folder / run.folder / WEIGHTS).exists()


def complete(
    runs: Sequence[Run], folder: Path, workers: int, tell: Callable[[Run, float, int], object]
) -> list[Run]:
    """Train what is missing, ``workers`` processes of one thread at a time; those that failed."""
    waiting = [run for run in runs if not is_done(run, folder)]
    running: dict[subprocess.Popen[bytes], tuple[Run, float]] = {}
    failed: list[Run] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                run = waiting.pop(0)
                running[_start(run, folder)] = (run, time.perf_counter())
            time.sleep(0.2)
            for process in [each for each in running if each.poll() is not None]:
                run, start = running.pop(process)
                tell(run, time.perf_counter() - start, process.returncode)
                if process.returncode:
                    failed.append(run)
    finally:  # after Ctrl-C, which they have received too, they save where they are
        for process in running:
            process.wait()
    return failed


def _start(run: Run, folder: Path) -> subprocess.Popen[bytes]:
    place = folder / run.folder
    place.mkdir(parents=True, exist_ok=True)
    (place / "words.json").write_text(json.dumps(run.words))
    words = [*TRAIN, *run.command]
    words += ["--seed", str(run.seed), "--out", str(place), "--accelerator", "cpu"]
    # The folder is this run's own, and holds its words already.
    words.append("--resume" if (place / "checkpoint.safetensors").exists() else "--overwrite")
    here = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
    with (place / "log.txt").open("ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment)

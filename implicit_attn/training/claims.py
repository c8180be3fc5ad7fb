"""Who may write where: one run at a time in a folder, and none over the files of another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from implicit_attn.checkpoint import read_progress
from implicit_attn.checkpoint.files import RunLock
from implicit_attn.command_line import Ending

# What the scripts write beside the checkpoint. Those of another run are not written over, and go
# where they are to be replaced, so that none stands beside a run that it does not belong to.
RESULTS = (
    "weights.safetensors",
    "epochs.csv",
    "steps.csv",
    "evaluations.csv",
    "convergence.csv",
    "extrapolation.csv",
    "report.png",
    "baseline-identity.safetensors",
    "baseline-encoder.safetensors",
    "comparison.csv",
    "robustness.csv",
    "confidence.csv",
    "comparison.png",
)


class NotClaimed(Ending, ValueError):
    """A run may not write its files: others are in their place, or being written, or none can be."""


def in_first(fabric: Any, act: Callable[[], object]) -> None:
    """Call ``act`` in the first process; where it fails by what it finds, all raise NotClaimed."""
    problem = ""
    if fabric.global_rank == 0:
        try:
            act()
        except (ValueError, OSError) as error:
            problem = str(error)
    if fabric.world_size > 1:
        problem = fabric.broadcast(problem)
    if problem:
        raise NotClaimed(problem)


@contextlib.contextmanager
def locked(fabric: Any, lock: RunLock) -> Iterator[None]:
    """The lock, held by the first process for all of them.

    Raises:
        NotClaimed: another run has it, or the folder cannot be written.
    """
    in_first(fabric, lock.acquire)
    try:
        yield
    finally:
        if fabric.global_rank == 0:
            lock.release()


def check_place(path: Path, *, overwrite: bool) -> None:
    """There is no checkpoint at ``path``, or it may be replaced.

    Raises:
        ValueError: there is one.
    """
    if path.exists() and not overwrite:
        raise ValueError(
            f"{path} is there already: resume that run, overwrite it, or name another path"
        )


def check_there(path: Path) -> None:
    """There is a checkpoint to resume.

    Raises:
        ValueError: there is none.
    """
    if not path.is_file():
        raise ValueError(f"nothing to resume: there is no {path}")


def check_start(path: Path, *, resume: bool, overwrite: bool) -> None:
    """A run that starts finds nothing to overwrite, one that goes on finds a whole checkpoint.

    Args:
        path: of the checkpoint.
        resume: the run goes on.
        overwrite: the files of an earlier run may be replaced.

    Raises:
        ValueError: an earlier run's files are there, or there is no whole checkpoint to resume;
            both options are given.
    """
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other")
    if resume:
        check_there(path)
        if not isinstance(read_progress(path).get("settings"), dict):
            raise ValueError(f"{path} is no checkpoint of a training: it holds no settings")
        return
    names = (path.name, *RESULTS)
    found = [name for name in names if path.with_name(name).exists()]
    if found and not overwrite:
        raise ValueError(
            f"{path.parent} holds the files of an earlier run ({', '.join(found)}): --resume goes on "
            "with it, --overwrite replaces it"
        )


def remove_results(path: Path) -> None:
    """Remove what stands beside the checkpoint ``path``, which itself stays until the next one."""
    for name in RESULTS:
        path.with_name(name).unlink(missing_ok=True)

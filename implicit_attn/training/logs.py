"""Logs of a training run: CSV files, TensorBoard."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from implicit_attn.optional import require
from solvers.core.checks import require_count


class Log(Protocol):
    """Takes a row per optimiser step and a row per epoch; written by the first process only."""

    def start(self, step: int, epochs: int) -> None:
        """Begin after ``step`` optimiser steps and ``epochs`` complete epochs.

        Rows that an earlier run wrote beyond them are dropped. An epoch whose last step is done
        but whose measures are not is not complete.
        """

    def step(self, step: int, values: dict[str, Any]) -> None:
        """The numbers of the batch that made ``step`` the number of steps done."""

    def epoch(self, step: int, values: dict[str, Any]) -> None:
        """The numbers of an epoch."""

    def close(self) -> None:
        """End the log."""


@runtime_checkable
class EvaluationLog(Log, Protocol):
    """A log that takes the measures of a training with ``evaluate_every``, too."""

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        """The measures after so many steps."""


def check_logs(logs: Sequence[Log], evaluate_every: int | None) -> tuple[Log, ...]:
    """TypeError where measures between epochs are asked for and a log does not take them."""
    for log in logs:
        if evaluate_every is not None and not isinstance(log, EvaluationLog):
            raise TypeError(
                f"logs must have a method evaluation(step, values) with evaluate_every, "
                f"{type(log).__name__} has none"
            )
    return tuple(logs)


def write_evaluation(logs: Sequence[Log], step: int, values: dict[str, Any]) -> None:
    """Hand a row of measures to the logs that take them."""
    for log in logs:
        if isinstance(log, EvaluationLog):
            log.evaluation(step, values)


class CsvLog:
    """``steps.csv``, ``epochs.csv`` and ``evaluations.csv`` in a folder, up to date while training runs.

    A run that was killed and resumed leaves the same rows as one that was not.

    Args:
        folder: is made where it does not exist.
        every: a row in ``steps.csv`` every so many steps.
    """

    def __init__(self, folder: str | Path, every: int = 10) -> None:
        self.folder, self.every = Path(folder), require_count("every", every)

    def start(self, step: int, epochs: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("steps.csv", "evaluations.csv"):
            _keep_rows(self.folder / name, {"step": step})
        _keep_rows(self.folder / "epochs.csv", {"step": step, "epoch": epochs})

    def step(self, step: int, values: dict[str, Any]) -> None:
        if step % self.every == 0:
            _append(self.folder / "steps.csv", {"step": step} | values)

    def epoch(self, step: int, values: dict[str, Any]) -> None:
        _append(self.folder / "epochs.csv", {"step": step} | values)

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        _append(self.folder / "evaluations.csv", {"step": step} | values)

    def close(self) -> None:
        """Every row is in its file already."""


def _append(path: Path, row: dict[str, Any]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(row)
        writer.writerow(row.values())


def _keep_rows(path: Path, limits: dict[str, int]) -> None:
    """Drop the rows beyond one of ``limits``, a number a column, and a last line that a killed
    process did not finish."""
    if not path.exists():
        return
    lines = [each for each in path.read_text().splitlines(keepends=True) if each.endswith("\n")]
    columns = lines[0].rstrip().split(",") if lines else []
    places = {columns.index(name): most for name, most in limits.items() if name in columns}
    rows = [
        line
        for line in lines[1:]
        if all(int(line.split(",")[place]) <= most for place, most in places.items())
    ]
    if not rows:
        path.unlink()
        return
    part = path.with_name(path.name + ".part")
    part.write_text("".join([lines[0], *rows]))
    os.replace(part, path)


class TensorBoardLog:
    """Scalars for TensorBoard: ``step/...`` and ``epoch/...``.

    Args:
        folder: of the event files.
        every: scalars of a step every so many steps.

    Raises:
        ImportError: TensorBoard is not installed (extra ``tensorboard``).
    """

    def __init__(self, folder: str | Path, every: int = 10) -> None:
        self.folder, self.every = Path(folder), require_count("every", every)
        self.writers = require("torch.utils.tensorboard", extra="tensorboard")
        self.writer: Any = None

    def start(self, step: int, epochs: int) -> None:
        # The viewer drops what an earlier run wrote from purge_step on, steps and epochs alike: an
        # epoch measured again after its last step was saved is a second point at that step.
        self.writer = self.writers.SummaryWriter(str(self.folder), purge_step=step + 1)

    def step(self, step: int, values: dict[str, Any]) -> None:
        if step % self.every == 0:
            self._write("step", step, values)

    def epoch(self, step: int, values: dict[str, Any]) -> None:
        self._write("epoch", step, values)

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        kept = {name: value for name, value in values.items() if name != "step"}
        self._write("evaluation", step, kept)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def _write(self, group: str, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{group}/{name}", value, step)

"""Which runs a table needs, which of them are done, and what comes next."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = (
    "parameters", "train_accuracy", "accuracy", "loss", "seconds", "cpu_seconds", "evaluations",
    "converged", "converged_worst", "adjoint_converged", "adjoint_converged_worst",
    "adjoint_products", "step_ms", "evaluation_ms", "status",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A line of the table; ``limit`` 0 stands for all training samples."""

    task: str
    limit: int
    row: str
    readout: str
    layers: int
    epochs: int


@dataclass(frozen=True)
class Run(Setting):
    """A training within a line: for the choice of the rate ("validation") or to be shown ("test")."""

    part: str
    rate: float
    seed: int


Results = dict[Run, dict[str, Any]]
NAMES = tuple(field.name for field in dataclasses.fields(Run))


@dataclass(frozen=True)
class Wanted:
    """A line with the rates to choose from and the seeds to show."""

    setting: Setting
    rates: tuple[float, ...]
    seeds: tuple[int, ...]

    def run(self, part: str, rate: float, seed: int) -> Run:
        return Run(**dataclasses.asdict(self.setting), part=part, rate=rate, seed=seed)

    @property
    def trials(self) -> list[Run]:
        """The runs that choose the rate, with the first seed; none for a single rate."""
        rates = self.rates if len(self.rates) > 1 else ()
        return [self.run("validation", rate, self.seeds[0]) for rate in rates]

    def shown(self, rate: float) -> list[Run]:
        """The runs of the table, at the chosen rate."""
        return [self.run("test", rate, seed) for seed in self.seeds]

    def chosen(self, done: Results) -> float | None:
        """The rate with the best accuracy on the validation part, by loss where several have that;
        None as long as one of them is not done."""
        if len(self.rates) == 1:
            return self.rates[0]
        if not all(run in done for run in self.trials):
            return None
        return max(self.trials, key=lambda run: _merit(done[run])).rate

    def missing(self, done: Results) -> list[Run]:
        """The runs that can start now."""
        rate = self.chosen(done)
        runs = self.trials if rate is None else self.shown(rate)
        return [run for run in runs if run not in done]


def _merit(found: dict[str, Any]) -> tuple[float, float]:
    if found["status"] != "ok":
        return (-math.inf, -math.inf)
    return (found["accuracy"], -found["loss"])


class Table:
    """The CSV file: a line a run, added as soon as the run has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: Results = dict(self._read())

    def add(self, run: Run, found: dict[str, Any]) -> None:
        """Keep the results of a run, in the file too."""
        unknown = sorted(set(found) - set(RESULTS))
        if unknown:
            raise ValueError(f"found must have results of {RESULTS} only, got {unknown}")
        results = dict.fromkeys(RESULTS, math.nan) | found
        content = self.path.read_bytes() if self.path.exists() else b""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            if content and not content.endswith(b"\n"):  # a line that was cut off stays alone
                file.write("\n")
            writer = csv.DictWriter(file, NAMES + RESULTS, lineterminator="\n")
            if not content:
                writer.writeheader()
            writer.writerow(dataclasses.asdict(run) | results)
        self.done[run] = results

    def _read(self) -> Iterator[tuple[Run, dict[str, Any]]]:
        if not self.path.exists():
            return
        with self.path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames is not None and tuple(reader.fieldnames) != NAMES + RESULTS:
                raise ValueError(
                    f"{self.path} has the columns {reader.fieldnames}, expected "
                    f"{[*NAMES, *RESULTS]}: choose another folder"
                )
            for line in reader:
                if any(line.get(name) in (None, "") for name in (*NAMES, *RESULTS)):
                    continue  # cut off while it was written; the run is done again
                whole = {n: int(line[n]) for n in ("limit", "layers", "epochs", "seed")}
                words = {n: line[n] for n in ("task", "row", "readout", "part")}
                found = {n: float(line[n]) for n in RESULTS if n != "status"}
                run = Run(**words, **whole, rate=float(line["rate"]))  # type: ignore[arg-type]
                yield run, found | {"status": line["status"]}


def complete(
    wanted: Sequence[Wanted],
    table: Table,
    perform: Callable[[Run], dict[str, Any]],
    executor: Executor,
    workers: int,
    tell: Callable[[Run, dict[str, Any]], object],
) -> dict[Run, BaseException]:
    """Do what is missing, line after line, at most ``workers`` runs at a time.

    Returns:
        The runs that raised an error; they are not in the file, so the next command tries again.
    """
    running: dict[Future[dict[str, Any]], Run] = {}
    failed: dict[Run, BaseException] = {}
    while True:
        taken = {*running.values(), *failed}
        waiting = (run for run in _all_missing(wanted, table) if run not in taken)
        while len(running) < workers and (run := next(waiting, None)) is not None:
            running[executor.submit(perform, run)] = run
        if not running:
            return failed
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            run = running.pop(future)
            error = future.exception()
            if isinstance(error, Exception):
                failed[run] = error
            elif error is not None:  # Ctrl-C
                raise error
            else:
                table.add(run, future.result())
                tell(run, table.done[run])


def _all_missing(wanted: Iterable[Wanted], table: Table) -> Iterator[Run]:
    for line in wanted:
        yield from line.missing(table.done)

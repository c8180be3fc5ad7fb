"""What layers learn: accuracies of one or more layers between the same embedding and readout.

python benchmarks/learning.py [--tasks digits mnist cifar10 recall same-different]
    [--readouts mean class] [--layers 1 3] [--rows encoder block ...] [--seeds 3] [--epochs N]
    [--rates R ...] [--limit N] [--out FOLDER] [--workers K] [--table]

Every run is a line of FOLDER/learning.csv as soon as it has ended; a command that was interrupted
goes on where it stopped. The rate of a row (of the logistic regression: its C) is chosen on seed 0 by
the last fifth of the training samples; "!" marks one at the end of the choice. All seeds are then
trained at that rate on all training samples and judged by the test samples. Times are those of the
processor, of one thread, for a batch of 64 and the whole model; "(busy)" marks a training for which
the clock showed over a tenth more.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.learns.cost import costs
from benchmarks.learns.here import Here
from benchmarks.learns.registry import TASKS, task_of
from benchmarks.learns.rows import MAIN_ROWS, ROWS
from benchmarks.learns.runs import Run, Setting, Table, Wanted, complete
from benchmarks.learns.summary import lines
from benchmarks.learns.task import Task
from benchmarks.learns.training import perform
from benchmarks.measure import table
from implicit_attn.command_line import (
    Parser,
    command,
    count,
    folder,
    make_folder,
    mistakes,
    positive,
    repeats,
    whole,
)

ROUNDS = 40
READOUTS = ("mean", "class", "query")


def parser() -> Parser:
    made = Parser(description="What layers learn between the same embedding and readout.")
    add = made.add_argument
    add(
        "--tasks",
        nargs="+",
        choices=list(TASKS),
        default=list(TASKS),
        metavar="TASK",
        help=f"of {', '.join(TASKS)}; all by default",
    )
    add(
        "--readouts",
        nargs="+",
        choices=READOUTS,
        default=list(READOUTS),
        metavar="READOUT",
        help="mean, class or query; each task has its own",
    )
    add("--layers", nargs="+", type=repeats, default=[1], help="numbers of layers, 1 by default")
    add(
        "--rows",
        nargs="+",
        choices=list(MAIN_ROWS),
        metavar="ROW",
        help=f"of {', '.join(MAIN_ROWS)}; all by default",
    )
    add(
        "--ablations",
        action="store_true",
        help="the block with one thing changed, in place of rows",
    )
    add("--seeds", type=whole(1, 1000), default=3, help="number of seeds, 3 by default")
    add("--epochs", type=count, help="instead of the task's own")
    add("--rates", nargs="+", type=positive, help="to choose from, instead of the row's own")
    add("--limit", type=whole(2), help="most training samples")
    add("--out", type=folder, default=Path("runs/learning"), help="folder of the CSV file")
    add("--workers", type=whole(1, 256), default=1, help="runs at a time, each of one thread")
    add(
        "--cost",
        action="store_true",
        help="only print what the block costs beside an encoder layer",
    )
    add("--table", action="store_true", help="only print the table of what is done")
    return made  # fmt: skip


def tasks_here(options: Any) -> dict[str, Task]:
    """The tasks whose data are here; what is missing is told."""
    found: dict[str, Task] = {}
    for name in dict.fromkeys(options.tasks):
        try:
            found[name] = task_of(name, options.limit)
        except (OSError, ImportError) as error:
            print(f"{name} left out: {error}", file=sys.stderr)
    return found


def plan(options: Any, tasks: dict[str, Task]) -> list[Wanted]:
    """The lines of the table, in its order; each setting once."""
    found: dict[Setting, Wanted] = {}
    for name, task in tasks.items():
        for readout in task.readouts:
            for number in options.layers:
                for row in _rows(options) if readout in options.readouts else ():
                    each = _wanted(options, name, task, readout, number, row)
                    if each is not None:
                        found.setdefault(each.setting, each)
    return list(found.values())


def _rows(options: Any) -> list[str]:
    if options.ablations:
        return [name for name in ROWS if name not in MAIN_ROWS]
    return options.rows or list(MAIN_ROWS)


def _wanted(
    options: Any, name: str, task: Task, readout: str, number: int, row: str
) -> Wanted | None:
    kind, limit, seeds = ROWS[row], options.limit or 0, tuple(range(options.seeds))
    epochs = options.epochs or task.epochs
    if kind.regression:
        if not task.pixels:
            return None
        return Wanted(Setting(name, limit, row, "pixels", 0, 0), kind.rates, seeds[:1])
    rates = tuple(options.rates or kind.rates)
    setting = Setting(name, limit, row, readout, number if kind.stacks else 0, epochs)
    return Wanted(setting, rates, seeds)


def told(start: float, run: Run, found: dict[str, Any]) -> None:
    """A line on the standard error for a run that has ended."""
    print(
        f"{time.perf_counter() - start:6.0f} s  {run.task} {run.readout} {run.layers} {run.row} "
        f"rate {run.rate:g} seed {run.seed}: {run.part} {100 * found['accuracy']:.1f} % "
        f"(train {100 * found['train_accuracy']:.1f} %), {found['status']}",
        file=sys.stderr,
        flush=True,
    )


def executor_of(workers: int) -> Executor:
    if workers == 1:
        return Here()
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads
    return ProcessPoolExecutor(workers, context, start_worker)


def start_worker() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is told once, by the first process


def main(arguments: list[str] | None = None) -> None:
    reader = parser()
    with command(reader):
        options = reader.parse_args(arguments)
        if options.ablations and options.rows:
            reader.error("--ablations takes the place of --rows; give one of them")
        torch.set_num_threads(1)
        if options.cost:
            print(costs(ROUNDS))
            return
        with mistakes("--out"):
            make_folder(options.out)
            kept = Table(options.out / "learning.csv")
        wanted = plan(options, tasks_here(options))
        failed: dict[Run, BaseException] = {}
        if not options.table:
            tell = partial(told, time.perf_counter())
            with executor_of(options.workers) as executor:
                failed = complete(wanted, kept, perform, executor, options.workers, tell)
        rows = lines(wanted, kept.done)
        print(table(rows) if rows else "no run of this table is done")
        for run, error in failed.items():
            print(f"failed: {run}: {type(error).__name__}: {error}", file=sys.stderr)
        if failed:
            reader.leave(1, f"{len(failed)} runs failed; the same command tries them again")


if __name__ == "__main__":
    main()

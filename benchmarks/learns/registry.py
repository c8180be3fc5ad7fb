"""The tasks by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

from benchmarks.learns.images import cifar10, digits, mnist, same_different
from benchmarks.learns.recall import recall
from benchmarks.learns.task import Task

TASKS: dict[str, Callable[[int | None], Task]] = {
    "digits": digits,
    "mnist": mnist,
    "cifar10": cifar10,
    "recall": recall,
    "same-different": same_different,
}


@functools.lru_cache(maxsize=1)  # the next run is mostly of the same task
def task_of(name: str, limit: int | None = None) -> Task:
    """The task of that name with at most ``limit`` training samples; None: all."""
    return TASKS[name](limit)

"""What every benchmark needs: interleaved timing, live memory, tables."""

from __future__ import annotations

import random
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def interleaved(
    contestants: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each, run in turns so that a noisy machine is noisy for all of them.

    The order of the turns changes: what ran before has its share in what is in the cache.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run()  # warm up
    turns, order = list(contestants.items()), random.Random(0)
    for _ in range(rounds):
        order.shuffle(turns)
        for name, run in turns:
            start = clock()
            run()
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def lower_thirds(runs: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of each, in turns: a third of its times are shorter, as other processes only add to them."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for found, run in zip(times, runs, strict=True):
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
    return [sorted(found)[len(found) // 3] for found in times]


class LiveMemory(TorchDispatchMode):
    """Peak bytes of tensor storages created and still alive inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        for output in outputs:
            if isinstance(output, torch.Tensor):
                self._note(output.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.seen:
            return
        self.seen.add(key)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def peak_bytes(run: Callable[[], object]) -> int:
    """Peak of live storages that ``run`` makes."""
    memory = LiveMemory()
    with memory:
        run()
    return memory.peak


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of one table as Markdown."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(name, "")) for name in names) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)

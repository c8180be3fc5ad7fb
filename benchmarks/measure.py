"""What every benchmark needs: interleaved timing, live memory, tables."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    share: float = 0.5,
    *,
    warm_up: bool = True,
) -> dict[str, float]:
    """Seconds of each, run in turns of changing order, so that a noisy machine is noisy for all of them.

    A ``share`` of the times is shorter than the result: the median, or less, as other processes only add.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values() if warm_up else ():
        run()
    turns, order = list(contestants.items()), random.Random(0)
    for _ in range(rounds):
        order.shuffle(turns)
        for name, run in turns:
            start = clock()
            run()
            times[name].append(clock() - start)
    every = {name: torch.tensor(each, dtype=torch.float64) for name, each in times.items()}
    return {name: each.quantile(share).item() for name, each in every.items()}


class LiveMemory(TorchDispatchMode):
    """Peak bytes of tensor storages created and still alive inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in tree_leaves(result):
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
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = (row.get(name, "") for name in names)
        texts = (f"{each:.3g}" if isinstance(each, float) else str(each) for each in cells)
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)

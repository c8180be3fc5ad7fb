"""Times on a CUDA device: what the host waits, and what the device alone takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

REPEATS = 3
CYCLES_A_SECOND = 2e9  # at most; the delay is rather too long than too short


def interleaved_on_device(
    contestants: dict[str, Callable[[], object]], rounds: int
) -> dict[str, tuple[float, float]]:
    """Median seconds of each, run in turns: of the host until all is done, of the device alone.

    Their difference is what launching costs where nothing else keeps the device busy.
    """
    enqueueing = {name: _enqueueing(run) for name, run in contestants.items()}  # also warms up
    host: dict[str, list[float]] = {name: [] for name in contestants}
    device: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            host[name].append(_on_host(run))
            device[name].append(_on_device(run, enqueueing[name]))
    return {
        name: (statistics.median(host[name]), statistics.median(device[name]))
        for name in contestants
    }


def _enqueueing(run: Callable[[], object]) -> float:
    """Seconds until the host has launched everything, the longest of some calls after the first."""
    run()
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return max(seconds)


def _on_host(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _on_device(run: Callable[[], object], enqueueing: float) -> float:
    """Events around calls that were all enqueued behind a kernel that sleeps: no launch gaps."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int((2 * REPEATS * enqueueing + 1e-4) * CYCLES_A_SECOND))
    begin.record()
    for _ in range(REPEATS):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / REPEATS

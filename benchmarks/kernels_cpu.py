"""The C++ kernel of the bi-softmax and the strips against stock attention, on a CPU.

    python benchmarks/kernels_cpu.py                       # one thread and two, the shapes below
    python benchmarks/kernels_cpu.py --threads 1 --cpu-time --rounds 25

Prints ratios of medians of runs taken in turns: a gradient by one forward pass of stock attention, a
Hessian-vector product by a forward and a backward pass, with the errors against the dense formula in
float64; then the same for the kernel's other paths, by its own time without mask, order or large scores.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tyro
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bisoftmax import Runs, Shape, attention, attention_and_back, inputs
from benchmarks.measure import interleaved, table
from implicit_attn.kernels import bisoftmax, bisoftmax_hvp

SHAPES: tuple[Shape, ...] = ((1, 8, 1024, 64), (4, 8, 197, 64), (8, 4, 65, 64))
BACKENDS = ("cpp", "blocks")
PATHS: dict[str, dict[str, Any]] = {
    "half masked": {"mask": True},
    "causal": {"causal": True},
    "unbounded": {"limit": 1e9},
}


def against_attention(shape: Shape, timed: Callable[[Runs], Any]) -> dict[str, Any]:
    z, v, beta, limit = inputs(shape)
    flash = SDPBackend.FLASH_ATTENTION
    runs: Runs = {
        "forward": lambda: attention(z, beta, flash),
        "forward+backward": lambda: attention_and_back(z, v, beta, flash),
    }
    for name in BACKENDS:
        lse = bisoftmax(z, beta, limit=limit, backend=name)[1]
        runs[f"gradient {name}"] = lambda name=name: bisoftmax(z, beta, limit=limit, backend=name)
        runs[f"hvp {name}"] = lambda name=name, lse=lse: bisoftmax_hvp(
            z, v, beta, limit=limit, lse=lse, backend=name
        )
    times = timed(runs)
    row: dict[str, Any] = {"shape": "x".join(map(str, shape)), "forward ms": 1e3 * times["forward"]}
    for name in BACKENDS:
        row[f"gradient, {name} / forward"] = times[f"gradient {name}"] / times["forward"]
    for name in BACKENDS:
        row[f"product, {name} / both"] = times[f"hvp {name}"] / times["forward+backward"]
    z, v = z[:1], v[:1]
    ours = bisoftmax(z, beta, limit=limit, backend="cpp")[0]
    exact = bisoftmax(z.double(), beta, backend="reference")[0]
    row["gradient's error"] = ((ours - exact).norm() / exact.norm()).item()
    ours = bisoftmax_hvp(z, v, beta, limit=limit, backend="cpp")
    exact = bisoftmax_hvp(z.double(), v.double(), beta, backend="reference")
    return row | {"product's error": ((ours - exact).norm() / exact.norm()).item()}


def other_paths(shape: Shape, timed: Callable[[Runs], Any]) -> dict[str, Any]:
    z, v, beta, _ = inputs(shape)
    runs: Runs = {}
    for name, given in {"plain": {}, **PATHS}.items():
        options = given | {"backend": "cpp"}
        if "mask" in given:
            options["mask"] = (torch.arange(shape[2]) % 2 == 0).expand(shape[0], -1)
        lse = bisoftmax(z, beta, **options)[1]
        runs[f"gradient {name}"] = lambda options=options: bisoftmax(z, beta, **options)
        runs[f"product {name}"] = lambda options=options, lse=lse: bisoftmax_hvp(
            z, v, beta, lse=lse, **options
        )
    times = timed(runs)
    row: dict[str, Any] = {"shape": "x".join(map(str, shape))}
    for kind in ("gradient", "product"):
        for name in PATHS:
            row[f"{kind}, {name}"] = times[f"{kind} {name}"] / times[f"{kind} plain"]
    return row


def main(
    threads: tuple[int, ...] = (1, 2),
    shapes: tuple[Shape, ...] = SHAPES,
    rounds: int = 15,
    paths: bool = True,
    cpu_time: bool = False,
) -> None:
    """Times the C++ kernel against stock attention.

    Args:
        shapes: batch, heads, tokens and features of a head; four numbers each.
        paths: the kernel's other paths, too.
        cpu_time: processor time, for a busy machine and one thread.
    """
    clock = time.process_time if cpu_time else time.perf_counter

    def timed(runs: Runs) -> dict[str, float]:
        return interleaved(runs, rounds, clock)

    for number in threads:
        torch.set_num_threads(number)
        print(f"\nthreads: {number}, medians of {rounds}")
        print(table([against_attention(shape, timed) for shape in shapes]), flush=True)
        if paths:
            print(table([other_paths(shape, timed) for shape in shapes]), flush=True)


if __name__ == "__main__":
    tyro.cli(main)

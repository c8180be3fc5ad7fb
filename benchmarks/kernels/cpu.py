"""The C++ kernel of the bi-softmax and the strips against stock attention, on a CPU.

    python benchmarks/kernels/cpu.py                       # one thread and two, the shapes below
    python benchmarks/kernels/cpu.py --threads 1 --cpu-time --rounds 25

Prints ratios of medians of runs taken in turns: a gradient by one forward
pass of stock attention, a Hessian-vector product by a forward and a backward pass, with the errors
against the dense formula in float64; then the same for the kernel's other paths, by its own time
without mask, order or large scores.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.bisoftmax import four_sizes
from benchmarks.bisoftmax_peers import attention, attention_and_back
from benchmarks.measure import interleaved, table
from implicit_attn.command_line import Parser, command, count, threads
from implicit_attn.kernels import bisoftmax, bisoftmax_hvp

SHAPES = ((1, 8, 1024, 64), (4, 8, 197, 64), (8, 4, 65, 64))
BACKENDS = ("cpp", "blocks")
PATHS: dict[str, dict[str, Any]] = {
    "half masked": {"mask": True},
    "causal": {"causal": True},
    "unbounded": {"limit": 1e9},
}
Runs = dict[str, Callable[[], object]]


def inputs(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, float, float]:
    """RMS-normalised tokens, a direction, beta, and the bound on the scores."""
    generator = torch.Generator().manual_seed(0)
    z, v = (torch.randn(shape, generator=generator) for _ in range(2))
    width = shape[3]
    return F.normalize(z, dim=-1) * width**0.5, v, width**-0.5, width**0.5


def against_attention(shape: tuple[int, ...], timed: Callable[[Runs], Any]) -> dict[str, Any]:
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
    return row | errors(z, v, beta, limit)


def errors(z: Tensor, v: Tensor, beta: float, limit: float) -> dict[str, float]:
    """Relative, of the first sample's heads by the kernel."""
    z, v = z[:1], v[:1]
    ours = (
        bisoftmax(z, beta, limit=limit, backend="cpp")[0],
        bisoftmax_hvp(z, v, beta, limit=limit, backend="cpp"),
    )
    exact = (
        bisoftmax(z.double(), beta, backend="reference")[0],
        bisoftmax_hvp(z.double(), v.double(), beta, backend="reference"),
    )
    differences = [(a - b).norm() / b.norm() for a, b in zip(ours, exact, strict=True)]
    return {"gradient's error": differences[0].item(), "product's error": differences[1].item()}


def other_paths(shape: tuple[int, ...], timed: Callable[[Runs], Any]) -> dict[str, Any]:
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


def main() -> None:
    parser = Parser(description="Times the C++ kernel against stock attention.")
    parser.add_argument("--threads", nargs="+", type=threads, default=[1, 2])
    parser.add_argument("--shapes", nargs="+", type=four_sizes, metavar="B,HEADS,N,P")
    parser.add_argument("--rounds", type=count, default=15)
    parser.add_argument("--paths", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time, for a busy machine and one thread"
    )
    with command(parser):
        run(parser.parse_args())


def run(args: argparse.Namespace) -> None:
    clock = time.process_time if args.cpu_time else time.perf_counter

    def timed(runs: Runs) -> dict[str, float]:
        return interleaved(runs, args.rounds, clock)

    for number in args.threads:
        torch.set_num_threads(number)
        print(f"\nthreads: {number}, medians of {args.rounds}")
        shapes = args.shapes or SHAPES
        print(table([against_attention(shape, timed) for shape in shapes]), flush=True)
        if args.paths:
            print(table([other_paths(shape, timed) for shape in shapes]), flush=True)


if __name__ == "__main__":
    main()

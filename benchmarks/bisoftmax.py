"""Bi-softmax gradient and Hessian-vector product against dense formulas, autograd and attention.

    python benchmarks/bisoftmax.py                    # CPU or GPU, the shapes of the table below
    python benchmarks/bisoftmax.py --shapes 1,8,1024,64 4,8,197,64 --rounds 9

Prints medians of interleaved runs as ratios, the achieved TFLOP/s (counting 6 N^2 p flops for a
gradient and 14 N^2 p for a product, as if every tile were computed once, whatever a backend saves)
and the share of the roofline (the time of just those flops and N^2 exponentials at the measured rates
of a large product and of exponentials; a share may exceed 1 where symmetry saves work). On a GPU
times are the device's own, by events around calls that are all enqueued before the first one runs,
and exponentials are timed in registers; up to 257 tokens the host's times, launches included, are
printed beside them, and at the end what was aimed at. A peer that cannot take a shape is reported.
Writes ``bisoftmax.csv``, after every shape, and ``bisoftmax.png`` to ``--output``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bisoftmax_peers import NOT_SUPPORTED, Contestants, able, contestants
from benchmarks.bisoftmax_report import FEW_TOKENS, launches, plot, ratios, targets, write
from benchmarks.device.device_time import interleaved_on_device
from benchmarks.measure import interleaved, peak_bytes, table
from implicit_attn.command_line import Parser, command, count, device, folder, size, threads
from implicit_attn.kernels import explain
from implicit_attn.optional import require

DTYPES = ("float32", "bfloat16", "float16", "float64")
CPU_SHAPES = ("8,4,65,64", "4,8,197,64", "1,8,512,64", "1,8,1024,32", "1,8,1024,64", "1,4,4096,64")
GPU_SHAPES = ("64,8,65,64", "64,8,197,64", "4,16,1024,64", "2,16,4096,64", "2,16,4096,128")


def rates(
    device: torch.device, dtype: torch.dtype, clock: Callable[[], float]
) -> tuple[float, float]:
    """Flops and exponentials a second of this machine."""
    side = 8192 if device.type == "cuda" else 1024
    a = torch.randn(side, side, device=device, dtype=dtype)
    if device.type == "cuda":
        seconds = interleaved_on_device({"product": lambda: a @ a}, 9)["product"][1]
        # A long exp over a tensor would measure the memory.
        exp_rate = require("benchmarks.device.exp_rate", extra="gpu").exp_rate
        return 2.0 * side**3 / seconds, exp_rate(device)
    work = torch.zeros(2**18)
    runs: Contestants = {"product": lambda: a @ a, "exp": lambda: torch.exp(work, out=work).zero_()}
    times = interleaved(runs, 9, clock)
    return 2.0 * side**3 / times["product"], work.numel() / times["exp"]


def timed(runs: Contestants, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds by name: of the device, and with " host" of the host; one clock on a CPU."""
    if device.type != "cuda":
        times = interleaved(runs, args.rounds, args.clock)
        return {f"{name} ms": 1e3 * seconds for name, seconds in times.items()}
    both = interleaved_on_device(runs, args.rounds)
    row = {f"{name} ms": 1e3 * device_time for name, (_, device_time) in both.items()}
    return row | {f"{name} host ms": 1e3 * host for name, (host, _) in both.items()}


def peak_mebibytes(run: Callable[[], object], device: torch.device) -> float:
    """Beyond what is held already."""
    if device.type != "cuda":
        return peak_bytes(run) / 2**20
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(
    shape: tuple[int, ...], args: argparse.Namespace, peak: tuple[float, float]
) -> dict[str, Any]:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    batch, heads, tokens, width = shape
    generator = torch.Generator().manual_seed(0)
    z, v = (torch.randn(shape, generator=generator) for _ in range(2))
    z = (F.normalize(z, dim=-1) * width**0.5).to(device, dtype)
    v, beta = v.to(device, dtype), width**-0.5
    limit = beta * width
    runs, refused = able(contestants(z, v, beta, limit, args.compiled))
    row: dict[str, Any] = {"shape": "x".join(map(str, shape)), "tokens": tokens}
    row["backend"] = explain(z, beta, limit=limit).backend
    times = timed(runs, device, args)
    pairs = batch * heads * tokens**2
    for name, units in (("gradient", 3), ("hvp", 7)):
        flops, seconds = 2.0 * units * pairs * width, times[f"{name} ms"] / 1e3
        parts = flops / peak[0], pairs / peak[1]
        # A GPU has other units for exp than for products; a CPU core does both by turns.
        bound = max(parts) if device.type == "cuda" else sum(parts)
        row |= {f"{name} TFLOP/s": flops / seconds / 1e12, f"{name} roofline": bound / seconds}
        row[f"{name} MiB"] = peak_mebibytes(runs[name], device)
    return row | times | {f"{name} ms": NOT_SUPPORTED for name in refused}


def four_sizes(text: str) -> tuple[int, ...]:
    """``type=`` of an option: batch, heads, tokens and features of a head, "8,4,65,64"."""
    if len(parts := text.split(",")) != 4:
        raise argparse.ArgumentTypeError(f"must be four integers B,HEADS,N,P, got {text!r}")
    return tuple(map(size, parts))


def main() -> None:
    parser = Parser(description="Times the bi-softmax against its peers.")
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", type=device, default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--shapes", nargs="+", type=four_sizes, metavar="B,HEADS,N,P")
    parser.add_argument("--rounds", type=count, default=9)
    parser.add_argument("--threads", type=threads, default=2, help="on the CPU")
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time, for a busy machine and one thread"
    )
    parser.add_argument("--output", type=folder, default=Path("runs/bisoftmax"))
    has_compiler = on_gpu or shutil.which("g++") is not None
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=has_compiler)
    with command(parser):
        args = parser.parse_args()
        defaults = GPU_SHAPES if on_gpu else CPU_SHAPES
        args.shapes = args.shapes or [four_sizes(text) for text in defaults]
        run(args)


def run(args: argparse.Namespace) -> None:
    args.clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    peak = rates(torch.device(args.device), getattr(torch, args.dtype), args.clock)
    print(f"{args.device} {args.dtype}: {peak[0] / 1e12:.3g} TFLOP/s, {peak[1]:.3g} exp/s")
    rows = []
    for shape in args.shapes:
        rows.append(measure(shape, args, peak))
        write(rows, args.output)
        print(table([ratios(rows[-1])]), flush=True)
        if rows[-1]["tokens"] <= FEW_TOKENS and launches(rows[-1]):
            print(table(launches(rows[-1])), flush=True)
    if torch.device(args.device).type == "cuda" and targets(rows):
        print(table(targets(rows)), flush=True)
    plot(rows, args.output / "bisoftmax.png")


if __name__ == "__main__":
    main()

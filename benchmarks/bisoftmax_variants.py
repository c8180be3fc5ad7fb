"""The bi-softmax kernels in their variants on a CUDA device: limits, masks, widths, tiles.

    python benchmarks/bisoftmax_variants.py                    # variants at (2, 16, 4096, 64)
    python benchmarks/bisoftmax_variants.py --sweep            # and other tiles than the tables'

Prints medians of interleaved runs on the device's clock, the work before a launch among them not. A
sweep changes one kernel's tiles at a time; what does not fit the card is said.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bisoftmax import DTYPES, four_sizes
from benchmarks.device.device_time import interleaved_on_device
from benchmarks.measure import table
from implicit_attn.command_line import Parser, command, count
from implicit_attn.kernels import bisoftmax, bisoftmax_hvp
from implicit_attn.optional import require

Runs = dict[str, Callable[[], object]]
SWEPT = {
    "gradient": (
        (128, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (64, 64, 4, 3),
        (64, 64, 4, 4),
    ),
    "curvature": ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2), (64, 64, 8, 3)),
    "triangle": ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 3), (32, 32, 4, 3)),
    "tangents": ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 4, 3)),
}


def both(shape: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Runs:
    """Gradient and product of rows of norm ``p^(1/2)``."""
    z, v = (torch.randn(shape, device="cuda", dtype=torch.float32) for _ in range(2))
    z = (F.normalize(z, dim=-1) * shape[-1] ** 0.5).to(dtype)
    beta = shape[-1] ** -0.5
    _, lse = bisoftmax(z, beta, backend="triton", **options)
    product = partial(bisoftmax_hvp, z, v.to(dtype), beta, lse=lse, backend="triton", **options)
    return {"gradient": partial(bisoftmax, z, beta, backend="triton", **options), "hvp": product}


def variants(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Runs]:
    batch, _, tokens, width = shape
    limit = 1.01 * width**0.5
    mask = torch.rand(batch, tokens, device="cuda") < 0.8
    found = {
        "limit": both(shape, dtype, limit=limit),
        "no limit": both(shape, dtype),
        "causal": both(shape, dtype, causal=True),
        "masked": both(shape, dtype, limit=limit, mask=mask),
    }
    for other in (72, 96):
        found[f"width {other}"] = both((*shape[:3], other), dtype, limit=1.01 * other**0.5)
    return found


def timed(name: str, runs: Runs, rounds: int) -> dict[str, Any]:
    times = interleaved_on_device(runs, rounds)
    return {"variant": name} | {f"{each} ms": 1e3 * device for each, (_, device) in times.items()}


def sweep(shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """Of the bounded kernels, one kernel's tiles at a time."""
    arguments: Any = require("implicit_attn.kernels.bi_softmax.triton.arguments", extra="gpu")
    tabulated, rows = arguments.tiles, []
    for kernel, candidates in SWEPT.items():
        for candidate in candidates:
            chosen = arguments.Tiles(*candidate)

            def instead(name: str, *rest: int, kernel: str = kernel, chosen: Any = chosen) -> Any:
                return chosen if name == kernel else tabulated(name, *rest)

            arguments.tiles = instead
            name = f"{kernel} {candidate}"
            try:
                rows.append(timed(name, both(shape, dtype, limit=1.01 * shape[-1] ** 0.5), rounds))
            except Exception as error:  # Triton's own kinds of errors: too much for the chip
                rows.append({"variant": name, "gradient ms": type(error).__name__, "hvp ms": "-"})
            finally:
                arguments.tiles = tabulated
    return rows


def main() -> None:
    parser = Parser(description="Times the variants of the bi-softmax kernels.")
    parser.add_argument("--shape", type=four_sizes, default="2,16,4096,64", metavar="B,HEADS,N,P")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument("--sweep", action="store_true", help="other tiles than the tables', too")
    with command(parser):
        args = parser.parse_args()
        if not torch.cuda.is_available():
            parser.error("no CUDA device")
        run(args)


def run(args: argparse.Namespace) -> None:
    shape, dtype = args.shape, getattr(torch, args.dtype)
    rows = [timed(name, runs, args.rounds) for name, runs in variants(shape, dtype).items()]
    print(table(rows), flush=True)
    if args.sweep:
        print(table(sweep(shape, dtype, args.rounds)), flush=True)


if __name__ == "__main__":
    main()

"""What the host does before the bi-softmax kernels are launched, on a machine without a card.

    python benchmarks/bisoftmax_host.py

Kernels are compiled for Hopper and the launch itself is left out. "handles" launches by remembered
handles, "bound" by Triton's own way; medians of interleaved runs, in microseconds a call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.measure import interleaved, table
from implicit_attn.command_line import Parser, command, count
from implicit_attn.optional import require

SHAPES = ((1, 2, 65, 64), (1, 1, 300, 64), (1, 1, 1024, 64))
VARIANTS: dict[str, dict[str, Any]] = {
    "limit": {"limit": 8.0},
    "no limit": {},
    # Some stock operators go before the kernels; here, unlike on a card, their work is counted as well.
    "masked": {"limit": 8.0, "mask": True},
}


class Absent:
    """What Triton asks of a driver, for a card that is not there."""

    def get_current_target(self) -> object:
        return require("triton.backends.compiler", extra="gpu").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def without_launches(kernel: Any) -> None:
    """In place of loading a compiled kernel: its launch does nothing."""
    kernel.module = kernel.function = 0
    kernel._run = lambda *_: None


def main() -> None:
    parser = Parser(description="Times the work before the kernels' launches.")
    parser.add_argument("--rounds", type=count, default=300)
    with command(parser):
        measure(parser.parse_args().rounds)


def measure(rounds: int) -> None:
    require("triton.runtime", extra="gpu").driver.set_active(cast(Any, Absent()))
    compiled = require("triton.compiler.compiler", extra="gpu").CompiledKernel
    compiled._init_handles = without_launches
    folder = "implicit_attn.kernels.bi_softmax.triton"
    backend: Any = require(f"{folder}.backend", extra="gpu")
    launch: Any = require(f"{folder}.launch", extra="gpu")
    arguments = require(f"{folder}.arguments", extra="gpu").LaunchArguments
    setattr(arguments, "capability", 90)  # noqa: B010
    torch.set_num_threads(1)
    by_handles, rows = launch.launch, []

    def bound(kernel: Any, programs: int, args: Any, options: dict[str, Any]) -> None:
        kernel[(programs,)](*args, **options)

    def run(way: Callable[..., None], function: Callable[[], object]) -> None:
        launch.launch = way
        function()

    for shape in SHAPES:
        z = torch.zeros(shape, dtype=torch.bfloat16)
        for name, options in VARIANTS.items():
            mask = torch.ones(shape[0], shape[2], dtype=torch.bool) if "mask" in options else None
            options = options | {"mask": mask}
            _, lse = backend.bisoftmax_forward(z, 0.1, **options)
            calls = {
                "gradient": partial(backend.bisoftmax_forward, z, 0.1, **options),
                "hvp": partial(backend.bisoftmax_hvp, z, z, 0.1, lse=lse, **options),
            }
            contestants: dict[str, Callable[[], object]] = {
                f"{call}, {way}": partial(run, launcher, function)
                for call, function in calls.items()
                for way, launcher in (("bound", bound), ("handles", by_handles))
            }
            times = interleaved(contestants, rounds)
            row = {"shape": "x".join(map(str, shape)), "variant": name}
            rows.append(row | {f"{each} us": 1e6 * seconds for each, seconds in times.items()})
    print(table(rows))


if __name__ == "__main__":
    main()

"""Compile the Triton kernels of bi-softmax for a device that need not be there.

The argument is its compute capability, 90 or 120. Prints one line per compiled kernel. Exits with a
traceback where one does not compile, and with a message where one needs more shared memory than a
program may have there.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from implicit_attn.kernels.bi_softmax.triton import arguments
from implicit_attn.kernels.bi_softmax.triton import backend as triton_backend

CAPABILITY = int(sys.argv[1])
SHARED_MEMORY = {90: 232448, 120: 101376}[CAPABILITY]
BRAIN, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
BOUNDED, ATOMIC = {"limit": 8.0}, {"deterministic": False}
# width, dtype, tokens, options of both functions, options of the forward one
Variant = tuple[int, torch.dtype, int, dict[str, Any], dict[str, Any]]
VARIANTS: dict[int, list[Variant]] = {
    90: [
        (64, BRAIN, 2048, BOUNDED, {}),
        (64, BRAIN, 2048, BOUNDED, ATOMIC),
        (24, HALF, 300, {"mask": True}, {}),
        (64, BRAIN, 300, {"causal": True}, {}),
        (64, BRAIN, 65, BOUNDED, {}),
        (32, SINGLE, 300, BOUNDED, {}),
        (128, BRAIN, 2048, BOUNDED, {}),
        (256, BRAIN, 2048, BOUNDED, {}),
    ],
    # The widest heads need the most memory.
    120: [
        (256, BRAIN, 2048, BOUNDED, {}),
        (256, BRAIN, 2048, BOUNDED, ATOMIC),
        (256, BRAIN, 300, {"causal": True}, {}),
        (256, BRAIN, 64, BOUNDED, {}),
    ],
}


class Absent:
    """What the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only(run: Any) -> Any:
    """``JITFunction.run`` that stops before the launch."""
    seen: set[str] = set()

    def replacement(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            print(self.fn.__name__, kernel.metadata.shared, flush=True)
            if kernel.metadata.shared > SHARED_MEMORY:
                sys.exit(f"{self.fn.__name__} needs {kernel.metadata.shared} bytes on chip")
        return kernel

    return replacement


def main() -> None:
    driver.set_active(cast(Any, Absent()))
    triton.JITFunction.run = compile_only(triton.JITFunction.run)
    setattr(arguments.LaunchArguments, "capability", CAPABILITY // 10)  # noqa: B010
    for width, dtype, tokens, options, forward in VARIANTS[CAPABILITY]:
        z = torch.zeros(2, 2, tokens, width, dtype=dtype)
        mask = torch.ones(2, tokens, dtype=torch.bool) if options.get("mask") else None
        options = {**options, "mask": mask}
        _, lse = triton_backend.bisoftmax_forward(z, 0.1, **options, **forward)
        if not forward:
            triton_backend.bisoftmax_hvp(z, z, 0.1, lse=lse, lse_cotangent=lse, **options)


if __name__ == "__main__":
    main()

"""Base-2 exponentials a second of a CUDA device, measured in registers."""

# pyright: reportArgumentType=false, reportCallIssue=false
# (Triton compiles the kernel; a checker sees the Python in it, and no option of the compiler.)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from benchmarks.device_time import interleaved_on_device

STEPS, BLOCK, NUMBERS = 512, 1024, 2**22


@triton.jit
def exponentials(x, out, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Each exponential needs the one before, so none can be left out; 8 chains in a thread."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    for _ in range(0, STEPS):
        value = tl.exp2(-value)
    tl.store(out + at, value)


def exp_rate(device: torch.device, rounds: int = 9) -> float:
    """Memory takes a few hundredths of the time: 8 bytes for ``STEPS`` exponentials."""
    x = torch.rand(NUMBERS, device=device)
    out = torch.empty_like(x)

    def run() -> None:
        exponentials[(NUMBERS // BLOCK,)](x, out, STEPS=STEPS, BLOCK=BLOCK, num_warps=4)

    return NUMBERS * STEPS / interleaved_on_device({"exp": run}, rounds)["exp"][1]

"""Compile the Triton kernels of bi-softmax for a device that need not be there.

The argument is its compute capability, such as 90. Prints a line of JSON for each compiled kernel: its name,
the options it was asked for with, bytes on the chip, and, where Triton brings a disassembler along, how many
instructions of which kind. Exits with a traceback where one does not compile, and with a message where one
needs more shared memory than a program may have there.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, cast

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from implicit_attn.kernels.bi_softmax import triton_backend

CAPABILITY = int(sys.argv[1])
# Hopper's; the tiles of other cards must fit into the least of all.
SHARED_MEMORY = 232448 if CAPABILITY == 90 else 101376
BRAIN, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
BOUNDED = {"limit": 8.0}
# width, dtype, tokens, options.
VARIANTS: list[tuple[int, torch.dtype, int, dict[str, Any]]] = [
    (64, BRAIN, 2048, {}),
    (72, BRAIN, 2048, BOUNDED),
    (24, HALF, 300, {"mask": True}),
    (64, BRAIN, 65, BOUNDED),
    (64, BRAIN, 300, {"causal": True}),
    (32, SINGLE, 300, BOUNDED),
    (64, BRAIN, 2048, BOUNDED),
    (128, BRAIN, 2048, {}),
    (256, BRAIN, 2048, BOUNDED),
]
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", re.MULTILINE)
# What is counted, by the beginning of an instruction; the first that fits.
KINDS = {
    "store to the stack": r"STL",
    "load from the stack": r"LDL",
    "tensor-core product": r"[HQ]GMMA|HMMA|UTC\w*MMA",
    "wait between products": r"WARPGROUP",
    "load of 2 bytes": r"LDG\.E\S*\.[US]16",
    "copy of 16 bytes": r"LDGSTS\S*128",
}


class Absent:
    """What the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def instructions(binary: bytes) -> dict[str, int] | None:
    """How many there are of each kind, and of all; None without a disassembler."""
    if not DISASSEMBLER.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(DISASSEMBLER), "-c", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = INSTRUCTION.findall(listing)
    found = Counter(
        next((kind for kind, pattern in KINDS.items() if re.match(pattern, name)), "other")
        for name in names
    )
    return {**{kind: found[kind] for kind in KINDS}, "all": len(names)}


def compile_only(asked: dict[str, Any]) -> None:
    """Have every launch compile and report, and go no further."""
    seen: set[str] = set()

    def replacement(kernel: Any, programs: int, args: Any, options: dict[str, Any]) -> None:
        compiled = kernel.warmup(*args, grid=(programs,), **options)
        if compiled.hash in seen:
            return
        seen.add(compiled.hash)
        shared = compiled.metadata.shared
        stages = compiled.metadata.num_stages
        report = {"kernel": kernel.fn.__name__, **asked, "shared": shared, "stages": stages}
        print(json.dumps(report | {"counts": instructions(compiled.asm["cubin"])}), flush=True)
        if shared > SHARED_MEMORY:
            sys.exit(f"{kernel.fn.__name__} needs {shared} bytes on chip")

    setattr(triton_backend, "launch", replacement)  # noqa: B010


def main() -> None:
    driver.set_active(cast(Any, Absent()))
    setattr(triton_backend, "capability_of", lambda device: CAPABILITY)  # noqa: B010
    for width, dtype, tokens, options in VARIANTS:
        compile_only({"width": width, "bytes": dtype.itemsize, "tokens": tokens, **options})
        z = torch.zeros(2, 2, tokens, width, dtype=dtype)
        mask = torch.ones(2, tokens, dtype=torch.bool) if options.get("mask") else None
        options = {**options, "mask": mask}
        _, lse = triton_backend.bisoftmax_forward(z, 0.1, **options)
        triton_backend.bisoftmax_hvp(z, z, 0.1, lse=lse, lse_cotangent=lse, **options)


if __name__ == "__main__":
    main()

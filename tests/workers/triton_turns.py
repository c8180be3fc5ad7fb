"""Compile the kernels of a turn for a card that need not be there: ``triton_turns.py CAPABILITY``."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.methods import triton_kernels as kernels

SMALL = {
    "partial", "gram", "weights", "norms", "caps", "gains", "score", "relative", "norm_at_best", "error",
    "limit", "bound", "scale", "path", "settings",
}  # fmt: skip
INTEGERS = {
    "status", "evaluations", "left", "flags", "rejections", "pairs", "nearby", "bounds", "first_chunks",
}  # fmt: skip
NUMBERS = {"size", "chunks", "most", "parts"}

for state in ("fp32", "fp64"):
    for kernel in (kernels._products, kernels._judge, kernels._combine):
        constants = {
            "M": 10,
            "P": 16,
            "C": 1024,
            "R": kernels.REDUCED,
            "MASKED": True,
            "S": 10,
            "S2": 16,
        }
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        signature = {}
        for name in kernel.arg_names:
            pointer = "fp64" if name in SMALL else "i32" if name in INTEGERS else state
            pointer = "i1" if name == "mask" else pointer
            signature[name] = "i32" if name in NUMBERS else "*" + pointer
            if name in constants:
                signature[name] = "constexpr"
        source = ASTSource(
            kernel, signature, {(kernel.arg_names.index(n),): v for n, v in constants.items()}
        )
        made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
        print(kernel.fn.__name__, state, len(made.asm["ptx"]), len(made.asm["cubin"]))

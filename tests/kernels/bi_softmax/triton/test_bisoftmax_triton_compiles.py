"""The Triton kernels compile and fit on a GPU, which the interpreter cannot tell; none is needed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(__file__).resolve().parents[4]
WORKER = ROOT / "tests" / "workers" / "triton_compile.py"
KERNELS = {
    "small_gradient_kernel", "small_hvp_kernel", "lse_kernel", "triangle_kernel",
    "triangle_lse_kernel", "triangle_mean_kernel", "gradient_kernel", "atomic_gradient_kernel",
    "causal_rows_kernel", "causal_columns_kernel", "mean_kernel", "curvature_kernel",
}  # fmt: skip
# Consumer cards have less than half of Hopper's shared memory; only the widest heads are tried.
LEFT_OUT = {90: set[str](), 120: {"small_hvp_kernel", "lse_kernel"}}


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's ptxas is looked for on x86-64")
@pytest.mark.parametrize("capability", LEFT_OUT)
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    """In a process of its own: here Triton may be set to interpret."""
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(WORKER), str(capability)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    assert {line.split()[0] for line in result.stdout.splitlines()} == KERNELS - LEFT_OUT[
        capability
    ]

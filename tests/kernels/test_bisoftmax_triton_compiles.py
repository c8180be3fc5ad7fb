"""The Triton kernels compile for a Hopper GPU, which the interpreter cannot tell; none is needed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
WORKER = Path(__file__).with_name("triton_compile_worker.py")
KERNELS = {
    "small_gradient_kernel", "small_hvp_kernel", "lse_kernel", "triangle_kernel",
    "triangle_lse_kernel", "triangle_mean_kernel", "gradient_kernel", "atomic_gradient_kernel",
    "causal_rows_kernel", "causal_columns_kernel", "mean_kernel", "curvature_kernel",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's ptxas is looked for on x86-64")
def test_every_kernel_compiles(tmp_path: Path) -> None:
    """In a process of its own: here Triton may be set to interpret."""
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(WORKER.parents[2])}
    result = subprocess.run(
        [sys.executable, str(WORKER)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert {line.split()[0] for line in result.stdout.splitlines()} == KERNELS

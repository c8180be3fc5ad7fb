"""The Triton kernels compile and fit on a GPU, which the interpreter cannot tell; none is needed.

Where Triton brings its disassembler along, the machine code is looked at as well: what the tile
tables and the shape of the loops are for.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "workers" / "triton_compile.py"
SMALL = {"small_gradient_kernel", "small_hvp_kernel"}
HALVES = {"triangle_kernel", "triangle_lse_kernel", "triangle_mean_kernel"}
ROWS = {"lse_kernel", "gradient_kernel", "mean_kernel", "curvature_kernel"}
CAUSAL = {"causal_rows_kernel", "causal_columns_kernel"}
# What is tried: everything on Hopper; elsewhere the kernels of what is hardest for the tables.
KERNELS = {
    80: SMALL | HALVES | ROWS | CAUSAL,
    90: SMALL | HALVES | ROWS | CAUSAL,
    100: SMALL | HALVES | ROWS,
    120: (SMALL | HALVES | ROWS | CAUSAL) - {"small_hvp_kernel", "lse_kernel"},
}
# The lowest Triton that setup.cfg allows, where "make triton-floor" has put it.
FLOOR = Path(sys.prefix) / "triton-floor"
on_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="Triton's ptxas is looked for on x86-64"
)


def compiled(
    capability: int, folder: Path, *words: str, floor: bool = False
) -> list[dict[str, Any]]:
    """What the worker reports, in a process of its own: here Triton may be set to interpret."""
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    search = os.pathsep.join((str(FLOOR), str(ROOT)) if floor else (str(ROOT),))
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": search}
    command = [sys.executable, str(WORKER), str(capability), *words]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
@on_x86
@pytest.mark.defect("E1")
@pytest.mark.defect("E2")
@pytest.mark.defect("E3")
@pytest.mark.defect("E7")
@pytest.mark.parametrize("capability", KERNELS)
def test_every_kernel_compiles_to_what_a_card_wants(capability: int, tmp_path: Path) -> None:
    reports = compiled(capability, tmp_path)
    assert {report["kernel"] for report in reports} == KERNELS[capability]
    check(reports, capability)


def check(reports: list[dict[str, Any]], capability: int) -> None:
    for report in reports:
        counts = report["counts"]
        if counts is None:
            continue
        # A kernel that cannot be lowered may come out empty, and without an error.
        assert counts["all"] > 100, report
        multiplies = report["kernel"] not in ("triangle_lse_kernel", "triangle_mean_kernel")
        assert (counts["tensor-core product"] > 0) == multiplies, report
        # Where ptxas serialises the products of Hopper it waits before and after each of them.
        assert counts["wait between products"] <= counts["tensor-core product"], report
        assert counts["load of 2 bytes"] == 0, report
        if report["width"] % 16 and report["tokens"] > 128 and multiplies:
            assert counts["copy of 16 bytes"] > 0, report
        # Two stages would leave the loads of a loop uncovered.
        if capability == 90 and report["width"] == 64 and report["tokens"] == 2048:
            assert report["stages"] >= 3, report
        if report["width"] <= 128 and report["bytes"] == 2:
            assert counts["store to the stack"] == counts["load from the stack"] == 0, report


@pytest.mark.slow
@on_x86
@pytest.mark.defect("C8")
@pytest.mark.skipif(not FLOOR.exists(), reason="`make triton-floor` has not been run")
def test_the_lowest_triton_allowed_compiles_on_hopper(tmp_path: Path) -> None:
    """Triton 3.2 aborts there. Whether nothing spills is up to its compiler."""
    floor = re.search(r"triton>=([\d.]+),", (ROOT / "setup.cfg").read_text("utf-8"))
    assert floor is not None
    installed = [path.name for path in FLOOR.glob("triton-*.dist-info")]
    assert [name for name in installed if name.startswith(f"triton-{floor[1]}.")] == installed
    assert installed
    reports = compiled(90, tmp_path, "few", floor=True)
    assert {report["kernel"] for report in reports} >= SMALL | HALVES | ROWS

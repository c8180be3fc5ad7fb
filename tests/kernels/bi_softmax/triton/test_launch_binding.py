"""How often a launch goes through all of Triton's own binding; without a card."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
# Kernels that do nothing; counts the launches that Triton has to bind and specialise anew.
COUNTS = """
import torch, triton
class Compiled:
    def __getitem__(self, grid):
        return lambda *args: None
bound = []
triton.JITFunction.run = lambda self, *args, grid, warmup, **options: (bound.append(1), Compiled())[1]
from implicit_attn.kernels.bi_softmax.triton import arguments, backend
arguments.LaunchArguments.capability = 90
z = torch.zeros(2, 2, 2048, 64, dtype=torch.bfloat16)
for _ in range(3):
    bound.clear()
    _, lse = backend.bisoftmax_forward(z, 0.1, None, False, 8.0)
    backend.bisoftmax_hvp(z, z, 0.1, None, False, lse, lse, limit=8.0)
    print(len(bound))
"""


@pytest.mark.defect("E5")
def test_only_the_first_launch_of_its_kind_is_bound_by_triton() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-c", COUNTS],
        env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    first, *later = map(int, result.stdout.split())
    assert first > 0
    assert later == [0, 0]

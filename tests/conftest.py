"""Set before anything imports Triton: where there is no CUDA device its kernels are interpreted.

Triton decides when it is imported whether ``@triton.jit`` compiles or interprets, and other tests
import it by way of ``torch.compile``; this file is read before any of them.
"""

from __future__ import annotations

import gc
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish() -> None:
    """The collected tests live to the end: no garbage collection need look at them again."""
    gc.collect()
    gc.freeze()

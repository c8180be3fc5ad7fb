"""Set before anything imports Triton: where there is no CUDA device its kernels are interpreted.

Triton decides when it is imported whether ``@triton.jit`` compiles or interprets, and other tests
import it by way of ``torch.compile``; this file is read before any of them.
"""

from __future__ import annotations

import gc
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _verify_on_request(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests count evaluations: a solve makes no further one unless it is told to or the test is marked."""
    if request.node.get_closest_marker("verifies") is None:
        from solvers.core import validate

        monkeypatch.setattr(validate, "ALWAYS", 0)
        monkeypatch.setattr(validate, "EVERY", 1 << 60)


def pytest_collection_finish() -> None:
    """The collected tests live to the end: no garbage collection need look at them again."""
    gc.collect()
    gc.freeze()

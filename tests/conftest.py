"""Set before anything imports Triton: where there is no CUDA device its kernels are interpreted.

Triton decides when it is imported whether ``@triton.jit`` compiles or interprets, and other tests
import it by way of ``torch.compile``; this file is read before any of them.

Code in C++ is compiled once for a run of the tests, outside of the user's cache.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from solvers.native import library

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish() -> None:
    """The collected tests live to the end: no garbage collection need look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def kernels_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # The parent belongs to all workers of a run: they share what one of them compiled.
    folder = tmp_path_factory.getbasetemp().parent / "implicit-attn-kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "cache_folder", lambda: folder)
        yield

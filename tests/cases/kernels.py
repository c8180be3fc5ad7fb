"""What the tests of all kernels share: the sizes to try, errors, and counting allocations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from implicit_attn.kernels import workspace
from solvers.native import library

CACHE_FOLDER = library.cache_folder  # which a run of the tests replaces
COUNTS = (1, 2, 15, 16, 17, 65, 81, 127, 128, 129, 257, 1000)


def cpp_lacks() -> str | None:
    """What the C++ kernel needs and this machine does not have; a compiler that fails is no excuse."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in library.INSTRUCTIONS:
        return f"the C++ kernel needs AVX2 or AVX-512, this processor has {capability}"
    return "there is no C++ compiler" if library.find_compiler() is None else None


needs_cpp = pytest.mark.skipif(cpp_lacks() is not None, reason=str(cpp_lacks()))


def difference(value: Tensor, exact: Tensor) -> float:
    """Norm of the error by the norm of the exact value (by 1 where that is 0)."""
    assert torch.isfinite(value).all()
    return ((value.double() - exact).norm() / (exact.norm() or 1.0)).item()


class Allocations(TorchDispatchMode):
    """Elements of the largest tensor made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __enter__(self) -> Allocations:
        workspace.release()  # else a buffer that an earlier call needed larger would count
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(output, Tensor):
                storage = output.untyped_storage()
                self.largest = max(self.largest, storage.nbytes() // output.element_size())
        return result

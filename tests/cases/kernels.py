"""What the tests of all kernels share: the sizes to try, errors, and counting allocations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from implicit_attn.kernels import strips
from implicit_attn.kernels.bi_softmax import native
from solvers import native as library

COUNTS = (1, 2, 15, 16, 17, 65, 81, 127, 128, 129, 257, 1000)
# Scores bounded by norms, by nothing, with a causal mask; (limit, causal).
PATHS = {"bounded": (None, False), "unbounded": (1e9, False), "causal": (None, True),
         "unbounded, causal": (1e9, True)}  # fmt: skip
each_path = pytest.mark.parametrize(("limit", "causal"), PATHS.values(), ids=PATHS.keys())


def states(
    batch: int, heads: int, count: int, width: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """z, v (B, H, N, p) and a cotangent of the lse (B, H, N), float32."""
    generator = torch.Generator().manual_seed(count * 1000 + width)
    z = scale * torch.randn(batch, heads, count, width, generator=generator)
    v = torch.randn(batch, heads, count, width, generator=generator)
    return z, v, torch.randn(batch, heads, count, generator=generator)


def masks(batch: int, count: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """None; some tokens masked; the same, and all of the first sample."""
    holes = torch.rand(batch, count, generator=torch.Generator().manual_seed(count)) > 0.4
    empty = holes.clone()
    empty[0] = False
    return None, holes, empty


def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package was installed without a compiler."""
    monkeypatch.setattr(library, "engine", lambda: None)


needs_engine = pytest.mark.skipif(library.engine() is None, reason="there is no native engine")
needs_cpp = pytest.mark.skipif(
    native._kernel() is None, reason="the engine has no kernel for this CPU"
)


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
        strips.release()  # else a buffer that an earlier call needed larger would count
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(output, Tensor):
                storage = output.untyped_storage()
                self.largest = max(self.largest, storage.nbytes() // output.element_size())
        return result

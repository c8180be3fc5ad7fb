"""What the package does differently on CUDA devices, and the switch that lets a CPU test it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_forced = False


def on_cuda(place: Tensor | torch.device) -> bool:
    """Whether the code for CUDA devices serves a tensor, or the tensors of a device."""
    device = place.device if isinstance(place, Tensor) else place
    return device.type == "cuda" or _forced


@contextmanager
def forced() -> Iterator[None]:
    """Within the context, the code for CUDA devices serves CPU tensors, too (for tests)."""
    global _forced
    outer, _forced = _forced, True
    try:
        yield
    finally:
        _forced = outer


def uses_tf32() -> bool:
    """Whether CUDA devices round the factors of float32 matrix products to TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# A compiler cannot trace the backend's settings and takes their value at the time of tracing.
uses_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]

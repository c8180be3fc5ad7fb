"""Host decisions about device tensors: exact on the CPU, without waiting on a GPU."""

from __future__ import annotations

from torch import Tensor


def maybe_any(mask: Tensor) -> bool:
    """Whether any entry holds; on a GPU always True, so that nothing waits for the answer.

    Callers must treat True as "perhaps": the guarded code has to be right, if wasteful, when no
    entry holds.
    """
    return bool(mask.any()) if mask.device.type == "cpu" else True

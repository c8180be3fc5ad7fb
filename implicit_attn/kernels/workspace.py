"""Buffers that strips are computed in, kept from call to call on the CPU."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# Elements of the largest buffer that is kept; a larger one is allocated for each call.
KEPT = 2**20

_OF_THIS_THREAD = threading.local()


def buffer(like: Tensor, number: int, size: int) -> Tensor:
    """Flat, uninitialised memory for ``size`` elements with the dtype and device of ``like``.

    A fresh allocation is paid for page by page when it is first written, which for small problems
    takes longer than the arithmetic. So each thread keeps the CPU buffers up to ``KEPT`` elements, one
    for each ``number`` and dtype: a buffer is good until the same one is asked for again.
    """
    if type(like) is not Tensor or like.device.type != "cpu" or size > KEPT:
        return like.new_empty(size)
    kept, name = vars(_OF_THIS_THREAD), f"{number} {like.dtype}"
    found = kept.get(name)
    if found is None or found.numel() < size:
        with torch.inference_mode(False):  # else it could not be written to outside of that mode
            found = torch.empty(size, dtype=like.dtype, device="cpu")
        if type(found) is Tensor:  # what a mode such as FakeTensorMode made is good only inside it
            kept[name] = found
    return found


def release() -> None:
    """Free the buffers of this thread."""
    vars(_OF_THIS_THREAD).clear()

"""Decisions of the host about tensors: exact on the CPU, without waiting for a GPU."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from solvers.core.context import CONTEXT
from solvers.core.cuda import on_cuda
from solvers.core.modes import in_transform


def readable(device: torch.device) -> bool:
    """Whether the host may decide by tensors of the device: they show their numbers, without waiting."""
    hidden = CONTEXT.recording or in_transform()
    return device.type == "cpu" and not hidden and not on_cuda(device)


def leaves_alone(compact: bool, device: torch.device) -> bool:
    """Whether a sample that has ended may leave its batch; else it is in each evaluation of the others."""
    return compact and readable(device)


def lag_of(device: torch.device) -> int:
    """How many steps old the host's knowledge may be: 0 where reading a tensor is free."""
    return 2 if on_cuda(device) else 0  # enough to keep the queue of kernels filled


class Watch:
    """The host's view of a mask of running samples.

    On the CPU the view is the mask itself; in transforms nothing is known. On CUDA each call queues an
    asynchronous copy and returns the mask of ``lag`` calls ago, so that the host neither waits for a kernel
    that it has just launched nor runs far ahead. A stopped sample never resumes, so an old mask is safe. The
    loop must freeze stopped samples itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._lag = lag_of(device)
        self._queue: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def __call__(self, running: Tensor) -> Tensor | None:
        """Queue ``running`` (n,) bool; return a host mask, or None while nothing is known yet."""
        if self._lag == 0:
            return running.cpu() if readable(running.device) else None
        self._queue.append(self._copy(running))
        if len(self._queue) <= self._lag:
            return None
        mask, event = self._queue.popleft()
        if event is not None:
            event.synchronize()
        return mask

    def reset(self) -> None:
        """Forget queued masks; call it when the batch has shrunk."""
        self._queue.clear()

    def _copy(self, running: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if not self._cuda:
            return running.clone(), None
        mask = torch.empty(running.shape, dtype=torch.bool, pin_memory=True)
        mask.copy_(running, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return mask, event


def maybe_any(mask: Tensor) -> bool:
    """Whether any entry holds; always True on a GPU, where the answer would have to be awaited,
    in transforms, and while a program is traced.

    The code behind it must also be right when no entry holds.
    """
    return bool(mask.any()) if readable(mask.device) else True


def small_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the small systems of a solver: float32 for half precision, else the state's."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def surely_all(mask: Tensor) -> bool:
    """Whether the host sees that every entry holds; False where it would have to wait for the answer.

    The code that it saves must also be right when every entry holds.
    """
    return readable(mask.device) and bool(mask.all())


def choose(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Rows of ``new`` (n, D) where ``mask`` (n, 1), else rows of ``old``; ``new`` where the host sees all."""
    return new if surely_all(mask) else torch.where(mask, new, old)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, 0 where the numerator is 0."""
    return torch.where(numerator == 0, numerator, numerator / denominator)


def true_rows(mask: Tensor) -> Tensor:
    """Indices of the True entries of a mask of n entries; waits for the device."""
    return torch.nonzero(mask.reshape(-1)).reshape(-1)

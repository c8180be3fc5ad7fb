"""Norms that couple the samples of a batch, or learn from it, are refused while f is first evaluated."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from solvers.core.modes import eager

LEARNING = (
    "f updates the running statistics of {} at every evaluation{}: call eval(), or use a norm of each "
    "sample (LayerNorm, GroupNorm)"
)
COUPLING = (
    "f normalises over the batch by {} in training mode, so that its samples are not solved on their "
    "own: call eval(), or use a norm of each sample (LayerNorm, GroupNorm)"
)

_BATCH_NORM: Callable[..., Tensor] = functional.batch_norm
_INSTANCE_NORM: Callable[..., Tensor] = functional.instance_norm


class _Watch(threading.local):
    """Whether this thread makes a first evaluation, and what was refused in it."""

    on: bool = False
    refused: ValueError | None = None


_THIS_THREAD = _Watch()
_LOCK = threading.Lock()
_number = 0  # of first evaluations under way, in all threads


class NormsRefused:
    """Within, batch norms in training mode and norms that learn raise ValueError in this thread.

    torch's two functions are replaced for the time of one evaluation. A ``TorchFunctionMode`` would
    double the time of this evaluation, and make ``torch.compile`` compile every f twice; looking for
    modules would miss those that f reaches in other ways than by its own attributes.
    """

    def __enter__(self) -> None:
        global _number
        self.outer, _THIS_THREAD.on = _THIS_THREAD.on, True
        _THIS_THREAD.refused = None
        with _LOCK:
            _number += 1
            if _number == 1:
                functional.batch_norm, functional.instance_norm = _batch_norm, _instance_norm

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        global _number
        _THIS_THREAD.on = self.outer
        refused, _THIS_THREAD.refused = _THIS_THREAD.refused, None
        with _LOCK:
            _number -= 1
            if _number == 0:
                functional.batch_norm, functional.instance_norm = _BATCH_NORM, _INSTANCE_NORM
        if refused is not None and error is not None and error is not refused:
            raise refused from error  # which a compiler that traces f has wrapped in one of its own


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training:
        _refuse("batch_norm", running_mean, coupled=True)
    return _BATCH_NORM(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if use_input_stats and running_mean is not None:
        _refuse("instance_norm", running_mean, coupled=False)
    return _INSTANCE_NORM(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


@eager  # it reads a thread's variables, which cannot be compiled
def _refuse(name: str, running_mean: Tensor | None, coupled: bool) -> None:
    """Raise ValueError in a thread that watches; a module's count of its batches is taken back."""
    if not _THIS_THREAD.on:
        return
    module = _calling_module(sys._getframe())
    what: Any = name if module is None else module
    if running_mean is None:
        raise _noted(COUPLING.format(what))
    if coupled and module is not None and module.num_batches_tracked is not None:
        with torch.no_grad():
            module.num_batches_tracked.sub_(1)  # counted before the norm is called
    raise _noted(
        LEARNING.format(what, ", and its samples are not solved on their own" if coupled else "")
    )


def _noted(message: str) -> ValueError:
    _THIS_THREAD.refused = ValueError(message)
    return _THIS_THREAD.refused


def _calling_module(frame: FrameType | None) -> _NormBase | None:
    """The module in whose ``forward`` the norm is called."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            return module if isinstance(module, _NormBase) else None
        frame = frame.f_back
    return None

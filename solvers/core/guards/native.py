"""Steps in C++ where the user wants them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from solvers.core.guards.telling import warn_user
from solvers.native.steps import Steps, missing, steps_for


class _Wanting(threading.local):
    """Whether this thread is where steps in C++ are wanted without the environment variable."""

    def __init__(self) -> None:
        self.on = False


_WANTING = _Wanting()


@contextmanager
def wanting_native_steps() -> Iterator[None]:
    """Within, steps in C++ are wanted."""
    outer, _WANTING.on = _WANTING.on, True
    try:
        yield
    finally:
        _WANTING.on = outer


def native_steps(like: Tensor) -> Steps | None:
    """Steps in C++ for tensors like this one, where the user wants them; says once where they are missing."""
    if torch.is_grad_enabled():  # a step may be recorded
        return None
    found = steps_for(like, asked=_WANTING.on)
    if found is None and (told := missing()) is not None:
        warn_user(told, RuntimeWarning, told)
    return found

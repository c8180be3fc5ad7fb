"""What a solve keeps for the functions that it calls, in one record for each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from solvers.core.modes import in_transform


class _Context(threading.local):
    """The record of one thread; outside of a solve it holds nothing."""

    weights: Weights | None = None  # parametrised weights that the innermost solve has computed
    masks: Any = None  # of the variational dropout of the innermost solve, with its seeds
    recording: bool = False  # a CUDA graph is being recorded


CONTEXT = _Context()


@contextmanager
def within(**values: Any) -> Iterator[None]:
    """Within the context, the record of this thread holds these values."""
    outer = {name: getattr(CONTEXT, name) for name in values}
    vars(CONTEXT).update(values)
    try:
        yield
    finally:
        vars(CONTEXT).update(outer)


def maybe_any(mask: Tensor) -> bool:
    """Whether any entry holds; True in a transform or a recording, where the host cannot see it.

    The code behind it must also be right when no entry holds.
    """
    return CONTEXT.recording or in_transform() or bool(mask.any())


@dataclass(eq=False)
class Weights:
    """The weights of :func:`implicit_attn.parametrised.parametrise` that one solve has computed.

    Each is computed once. With ``graded`` it has a graph even if the solve computes it without gradients, so
    that the evaluation that is differentiated can use it.

    ``torch.nn.utils.parametrize.cached()`` does the same for all threads at once, so that a training would
    share the graphs of its weights with other threads. It still serves the parametrizations of a user.
    """

    computed: dict[int, tuple[Callable[[], Tensor], Tensor]] = field(default_factory=dict)
    graded: bool = False

    def read(self, parametrization: Callable[[], Tensor]) -> Tensor:
        """The weight, which is computed at the first call."""
        found = self.computed.get(id(parametrization))
        if found is None:
            with torch.set_grad_enabled(self.graded or torch.is_grad_enabled()):
                found = (parametrization, parametrization())
            self.computed[id(parametrization)] = found
        return found[1]

"""What a solve keeps for the functions that it calls, in one record for each thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from solvers.core.modes import in_transform, outside_inference

# A computed weight, and the parameters that it was computed from.
Weight = tuple[Tensor, tuple[Tensor | None, ...]]


class _Context(threading.local):
    """The record of one thread; outside of a solve it holds nothing."""

    masks: Any = None  # of the variational dropout of the innermost solve, with its seeds
    recording: bool = False  # a CUDA graph is being recorded

    def __init__(self) -> None:
        self.weights: dict[int, Weight] = {}  # that the innermost solve has computed, by id


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


def weights_of(modules: Iterable[nn.Module]) -> dict[int, Weight]:
    """Compute the weights of :func:`implicit_attn.parametrised.parametrise`, by the id of each.

    With ``within(weights=...)`` a solve computes each once, with a graph where the caller records. Those of
    ``torch.nn.utils.parametrize`` are left to its ``cached()``, which serves all threads at once.
    """
    computed: dict[int, Weight] = {}
    inference = torch.is_inference_mode_enabled()
    with outside_inference():
        for module in modules:
            lists: Any = module._modules.get("parametrizations") or {}
            for name in getattr(module, "computed_once", ()) if lists else ():
                if name in lists:
                    part, graded = lists[name], torch.is_grad_enabled() and not inference
                    with torch.set_grad_enabled(graded):
                        computed[id(part)] = part(), tuple(part._parameters.values())
    return computed

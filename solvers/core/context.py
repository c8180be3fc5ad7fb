"""What a solve keeps for the functions that it calls, in one record for each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize

from solvers.core.modes import in_transform, recording


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
    """The parametrised weights of one solve, each of which is computed once and then constant.

    They serve the weights of :func:`implicit_attn.parametrised.parametrise`. Those of a user's own
    parametrizations are computed at every evaluation, as everywhere in torch.

    With ``graded``, the weights have a graph even if the solve computes them without gradients, so that the
    evaluation that is differentiated can use them. The nodes of the graph have numbers from ``start``.
    """

    computed: dict[int, tuple[Callable[[], Tensor], Tensor]] = field(default_factory=dict)
    graded: bool = False
    start: int = 0
    # Within torch.utils.checkpoint: what the computation saves must not be computed again.
    checkpointed: bool = False

    def read(self, parametrization: Callable[[], Tensor]) -> Tensor:
        """The weight, which is computed at the first call."""
        found = self.computed.get(id(parametrization))
        if found is None:
            saved = saved_tensors_hooks(_same, _same) if self.checkpointed else nullcontext()
            with saved, torch.set_grad_enabled(self.graded or torch.is_grad_enabled()):
                found = (parametrization, parametrization())
            self.computed[id(parametrization)] = found
        return found[1]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def sequence_number() -> int:
    """Return the number that autograd gives to the next node of this thread."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


# Parts of parametrizations that are in evaluation mode during solves: in how many, over all threads.
_HELD: dict[nn.Module, int] = {}
_LOCK = threading.Lock()


@contextmanager
def constant_weights(
    modules: list[nn.Module], weights: Weights | None = None, *, repeated: bool = False
) -> Iterator[None]:
    """Within the context, every parametrised weight has one value.

    A parametrization with buffers may change them whenever its weight is read in training mode, as torch's
    ``spectral_norm`` does by a power iteration. Its weight is read once at the beginning, and then it is in
    evaluation mode. Under ``parametrize.cached()`` every weight is read, so that its cache holds weights with
    a graph.

    Args:
        modules: what f calls, by :func:`modules_of`.
        weights: those that the solve has computed already; None for new ones.
        repeated: the weights have the values of an earlier evaluation, so nothing is read.
    """
    parts: list[nn.Module] = []
    with within(weights=Weights() if weights is None else weights):
        cached = parametrize._cache_enabled
        for module in filter(parametrize.is_parametrized, modules):
            lists: Any = module.parametrizations
            for name in lists:
                changing = [part for part in lists[name].modules() if part._buffers]
                if (changing or cached) and not repeated:
                    with recording() if cached else nullcontext():
                        getattr(module, name)
                parts += changing
        with _LOCK:
            parts = [part for part in parts if part.training or part in _HELD]
            for part in parts:
                _HELD[part] = _HELD.get(part, 0) + 1
                part.training = False
        try:
            yield
        finally:
            with _LOCK:
                for part in parts:
                    _HELD[part] -= 1
                    if _HELD[part] == 0:
                        del _HELD[part]
                        part.training = True


MOST = 100  # entries of a container, and objects, that are looked through


def modules_of(f: object, depth: int = 5) -> list[nn.Module]:
    """Return the modules that ``f`` may call, with all of their parts.

    These are ``f`` itself, what an object has as attributes, the object of a bound method, the arguments of a
    ``partial``, and what a function reads from its closure or from global variables, also in lists and dicts.
    """
    found: dict[int, nn.Module] = {}
    pending, seen = [(f, depth)], set[int]()
    while pending:
        part, left = pending.pop(0)
        if isinstance(part, nn.Module):
            listed: Any = part.modules() if id(part) not in found else ()
        else:
            listed = getattr(part, "walked_modules", ())  # the map of a layer has them
        for module in listed:
            if id(module) not in found:
                found[id(module)] = module
                if "function" in vars(module):
                    pending.append((vars(module)["function"], left))
        plain = not (listed or isinstance(part, (nn.Module, Tensor, type, ModuleType)))
        if plain and left and len(seen) < MOST and id(part) not in seen:
            seen.add(id(part))
            pending += [(each, left - 1) for each in _reads(part) if each is not None]
    return list(found.values())


def _reads(f: Any) -> list[object]:
    """Return what a container holds, or what an object or function that is no module reads."""
    if isinstance(f, (list, tuple, dict)):
        return list(f.values() if isinstance(f, dict) else f) if len(f) <= MOST else []
    if isinstance(f, partial):
        return [f.func, *f.args, *f.keywords.values()]
    reads: list[object] = [getattr(f, "__self__", None), getattr(f, "__func__", None)]
    reads += getattr(f, "__dict__", {}).values()
    code = getattr(f, "__code__", None)
    if code is not None:
        known = getattr(f, "__globals__", {})
        reads += [known.get(name) for name in code.co_names]
        for cell in getattr(f, "__closure__", None) or ():
            try:
                reads.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
    return reads

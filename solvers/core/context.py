"""What a solve keeps for the functions that it calls, in one record for each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize

from solvers.core.modes import recording


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


@dataclass(eq=False)
class Weights:
    """The parametrised weights of one solve, each of which is computed once and then constant.

    They serve the weights of :func:`implicit_attn.parametrised.parametrise`. Those of a user's own
    parametrizations are computed at every evaluation, as everywhere in torch.
    """

    computed: dict[int, tuple[Callable[[], Tensor], Tensor]] = field(default_factory=dict)
    # Within torch.utils.checkpoint: what the computation saves must not be computed again.
    checkpointed: bool = False

    def read(self, parametrization: Callable[[], Tensor]) -> Tensor:
        """The weight, which is computed at the first call."""
        found = self.computed.get(id(parametrization))
        if found is None:
            with saved_tensors_hooks(_same, _same) if self.checkpointed else nullcontext():
                found = (parametrization, parametrization())
            self.computed[id(parametrization)] = found
        return found[1]


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def constant_weights(modules: list[nn.Module], *, repeated: bool = False) -> Iterator[None]:
    """Within the context, every parametrised weight has one value.

    A parametrization with buffers may change them whenever its weight is read in training mode, as torch's
    ``spectral_norm`` does by a power iteration. It is read once before the solve, and is in evaluation mode
    during the solve. A cache of ``parametrize.cached()`` is filled before the solve, with weights that have a
    graph.

    Args:
        modules: what f calls, by :func:`modules_of`.
        repeated: the weights have the values of an earlier evaluation, so none is read before.
    """
    changing = []
    for module in modules:
        if isinstance(module, parametrize.ParametrizationList):
            changing += [part for part in module.modules() if part.training and part._buffers]
    if not repeated and (changing or parametrize._cache_enabled):
        with recording():
            for module in filter(parametrize.is_parametrized, modules):
                lists: Any = module.parametrizations
                for name in lists:
                    getattr(module, name)
    for part in changing:
        part.training = False
    try:
        with within(weights=Weights()):
            yield
    finally:
        for part in changing:
            part.training = True


def modules_of(f: object, depth: int = 4) -> list[nn.Module]:
    """The modules that ``f`` may call, with all of their parts.

    These are ``f`` itself, attributes of an object, the object of a bound method, arguments of a ``partial``,
    and what a function reads from its closure or from global variables.
    """
    found: dict[int, nn.Module] = {}
    pending: list[tuple[object, int]] = [(f, depth)]
    while pending:
        part, left = pending.pop()
        # The map of a layer has a list of the modules of its update.
        listed = part.modules() if isinstance(part, nn.Module) else getattr(part, "modules", None)
        if isinstance(listed, (list, Iterator)):
            for module in listed:
                if found.setdefault(id(module), module) is module and "function" in vars(module):
                    pending.append((vars(module)["function"], left))
        elif left and callable(part) and not isinstance(part, type):
            pending += [(each, left - 1) for each in _reads(part)]
    return list(found.values())


def _reads(f: Any) -> list[object]:
    """What a callable that is no module reads."""
    if isinstance(f, partial):
        return [f.func, *f.args, *f.keywords.values()]
    reads: list[object] = [getattr(f, "__self__", None), getattr(f, "__func__", None)]
    reads += getattr(f, "__dict__", {}).values()
    code = getattr(f, "__code__", None)
    if code is not None:
        reads += [f.__globals__.get(name) for name in code.co_names]
        reads += [_content(cell) for cell in f.__closure__ or ()]
    return reads


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None

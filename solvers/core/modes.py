"""The modes of torch during a solve (autocast, gradients, compilation), and what it reads of modules once."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C import _functorch  # type: ignore[attr-defined]
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _pytree as pytree

from solvers.core.layout import leaves_of

Function = TypeVar("Function", bound=Callable[..., Any])
# Lower torch versions do not tell an export from a compilation.
_IS_EXPORTING: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)


def eager(function: Function) -> Function:
    """``torch.compiler.disable`` that keeps the function's type and does not import the compiler.

    A solver loop branches on values at every step, where a compiler would break its graph anyway.
    """
    frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    if not hasattr(frames, "set_code_exec_strategy"):  # before torch 2.7
        return cast(Function, torch.compiler.disable(function))
    disabled: list[Callable[..., Any]] = []  # made as soon as there is a compiler

    def run(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            outer = frames.set_eval_frame(None)  # what makes the wrapper is not compiled either
            disabled.append(torch.compiler.disable(function))
            frames.set_eval_frame(outer)
        return disabled[0](*args, **kwargs)

    # A compiler neither follows a call of this function nor compiles it where it runs.
    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(run.__code__, skip)
    return cast(Function, functools.update_wrapper(run, function))


def exporting() -> bool:
    """Whether ``torch.export`` is recording a program."""
    return bool(_IS_EXPORTING())


def refuse_export(instead: str) -> None:
    """Raise RuntimeError, naming what to export ``instead``, while a solve is exported or traced."""
    if exporting() or torch._C._get_tracing_state() is not None:
        raise RuntimeError(
            "a fixed-point solve decides by numbers when each sample has converged, which no exported "
            f"program can: export a fixed number of evaluations instead, {instead}"
        )


def refuse_shapes(tree: Any) -> None:
    """Raise RuntimeError for tensors that have a shape and no numbers: fake ones, and those on "meta"."""
    fake: Any = sys.modules.get("torch._subclasses.fake_tensor")
    for leaf in leaves_of(tree):
        if isinstance(leaf, Tensor) and (leaf.is_meta or (fake and fake.is_fake(leaf))):
            raise RuntimeError(
                "a fixed-point solve decides by numbers, which meta and fake tensors lack: for shapes "
                "evaluate the function once, or use layer.unrolled(1)"
            )


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` is at work, whose tensors do not show their numbers."""
    return _functorch.peek_interpreter_stack() is not None


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of the surrounding autocast; None where it is off."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast off; free where it is off already."""
    off = autocast_dtype(device) is None
    return nullcontext() if off else torch.autocast(device, enabled=False)


@contextmanager
def recording() -> Iterator[None]:
    """Gradients on, also under ``no_grad`` and ``inference_mode``."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.enable_grad():
            yield
    else:
        with torch.enable_grad():
            yield


class _Stance:
    """How many recordings, in all threads, ask for ``torch.compile`` to stand aside."""

    def __init__(self) -> None:
        self.lock, self.number = threading.Lock(), 0
        self.before: Any = None  # the stance to return to

    def enter(self) -> None:
        with self.lock:
            if self.before is None and "torch._dynamo" in sys.modules:  # whose import takes seconds
                self.before = torch.compiler.set_stance("force_eager")
            self.number += 1

    def leave(self) -> None:
        with self.lock:
            self.number -= 1
            if self.number == 0 and self.before is not None:
                self.before.__exit__(None, None, None)
                self.before = None


_STANCE = _Stance()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Functions compiled by ``torch.compile`` run as they were before compilation.

    torch keeps this stance for all threads; a compiled function that another thread calls meanwhile is
    slower, not wrong.
    """
    if torch.compiler.is_compiling():
        yield
        return
    _STANCE.enter()
    try:
        yield
    finally:
        _STANCE.leave()


class _PlainAttention:
    """A context in which attention is computed by torch's plain formula, in all threads of the process.

    torch keeps the choice for the whole process. The first thread that enters makes it, and the last one
    that leaves takes it back, so threads that interleave leave it as it was.
    """

    def __init__(self) -> None:
        self.lock, self.entered, self.chosen = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if self.entered == 0:
                self.chosen.enter_context(sdpa_kernel(SDPBackend.MATH))
            self.entered += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.entered -= 1
            if self.entered == 0:
                self.chosen.close()


PLAIN_ATTENTION = _PlainAttention()


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Within, attention is computed by torch's plain formula, and compiled functions run uncompiled."""
    with uncompiled(), PLAIN_ATTENTION:
        yield


def ordinary(tree: Any) -> Any:
    """The pytree with copies of its inference tensors, which no backward pass could save."""

    def copy(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf

    return pytree.tree_map(copy, tree)


class _PerThread(threading.local):
    """The weights that the innermost solve of this thread has computed; None outside of a solve."""

    weights: Weights | None = None


_OF_THIS_THREAD = _PerThread()


@dataclass(eq=False)
class Weights:
    """Parametrised weights (``torch.nn.utils.parametrize``) that are computed once and then constant.

    They belong to one solve in one thread. torch's own cache, ``parametrize.cached()``, is one for
    all threads, so a solve neither reads it nor writes to it.
    """

    computed: dict[int, tuple[ParametrizationList, Tensor]] = field(default_factory=dict)
    # Within torch.utils.checkpoint: what the computation saves must not be computed again.
    checkpointed: bool = False
    # The weights are those of an earlier evaluation: torch's spectral_norm makes no further power iteration.
    repeated: bool = False

    @contextmanager
    def constant(self) -> Iterator[None]:
        """Within, this thread reads these weights."""
        _shield_the_cache()
        outer = _OF_THIS_THREAD.weights
        _OF_THIS_THREAD.weights = self
        try:
            yield
        finally:
            _OF_THIS_THREAD.weights = outer

    def read(self, parametrization: ParametrizationList) -> Tensor:
        """The weight, computed at the first call."""
        found = self.computed.get(id(parametrization))
        if found is None:
            kept = saved_tensors_hooks(_same, _same) if self.checkpointed else nullcontext()
            with kept, _no_power_iteration(parametrization) if self.repeated else nullcontext():
                found = (parametrization, _COMPUTE(parametrization))
            self.computed[id(parametrization)] = found
        return found[1]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def weights_of_this_solve() -> Weights | None:
    """The weights that this thread is solving with."""
    return _OF_THIS_THREAD.weights


def constant_weights(repeated: bool = False) -> AbstractContextManager[None]:
    """Within, parametrised weights are computed once, by and for this thread alone.

    A solve computes weights without a graph, or with that of a recording, which nobody else may read.
    With ``repeated`` the weights have the values of the evaluations before, where computing them changes
    a buffer, as torch's ``spectral_norm`` does in training.
    """
    return Weights(repeated=repeated).constant()


@contextmanager
def _no_power_iteration(parametrization: ParametrizationList) -> Iterator[None]:
    """Within, the spectral norms of a parametrization use the singular vectors that they have."""
    training = [
        part for part in parametrization if isinstance(part, _SpectralNorm) and part.training
    ]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


_COMPUTE: Callable[[ParametrizationList], Tensor] = ParametrizationList.forward


def _weight(self: ParametrizationList) -> Tensor:
    """``ParametrizationList.forward``: as torch defines it, but constant within a solve."""
    if torch.compiler.is_dynamo_compiling():  # a thread's own variables cannot be traced
        return _COMPUTE(self)
    weights = _OF_THIS_THREAD.weights
    if weights is None:
        return _COMPUTE(self)
    _shield_the_cache()  # which another thread may have replaced since the solve began
    return weights.read(self)


class _SharedCache(dict[Any, Any]):
    """torch's cache of ``parametrize.cached()``; it appears to be empty to a thread that solves."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default if _OF_THIS_THREAD.weights is not None else super().get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        if _OF_THIS_THREAD.weights is None:
            super().__setitem__(key, value)


def _shield_the_cache() -> None:
    """Put :class:`_SharedCache` in the place of torch's plain dict, with the same contents."""
    cache = parametrize._cache
    if type(cache) is not _SharedCache:
        parametrize._cache = _SharedCache(cache)


# The only hook that serves the modules of any user, in closures too, without knowing them. It is put
# on the class, once; outside of solves it changes nothing.
ParametrizationList.forward = _weight  # type: ignore[method-assign]


Found = TypeVar("Found")


class _Read(threading.local):
    """What was read, by who reads it or by the module; None: in no solve."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] | None = None


READ = _Read()


@contextmanager
def read_once() -> Iterator[None]:
    """Within, modules are read once, until :func:`read_anew`."""
    outer, READ.kept = READ.kept, {}
    try:
        yield
    finally:
        READ.kept = outer


def read_anew() -> None:
    """The user's own code has run, which may have changed a module."""
    if READ.kept is not None:
        READ.kept.clear()


def parts_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """``module.named_modules()``, each path but its own, ``""``, followed by a dot."""
    if torch.compiler.is_compiling():  # a compiler follows no variables of a thread
        return [(f"{path}." if path else "", part) for path, part in module.named_modules()]
    return found_once(module, lambda: _walk(module))


def found_once(what: Hashable, find: Callable[[], Found]) -> Found:
    """What has been found in this solve, of whatever hangs on modules alone."""
    kept = READ.kept
    if kept is None:
        return find()
    if what not in kept:
        kept[what] = find()
    return kept[what]


def _walk(module: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    open_places, seen = [("", module)], set[int]()
    while open_places:
        prefix, part = open_places.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        found.append((prefix, part))
        # By ``items``, which TorchScript's modules have too, without the other methods of a dict.
        for name, child in reversed(list(part._modules.items())):
            if child is not None:
                open_places.append((f"{prefix}{name}.", child))
    return found

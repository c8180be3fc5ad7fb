"""Failures told to the user: warnings that point at their line, errors that can be pickled."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from dataclasses import replace
from functools import partial
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

# Packages whose frames are not the user's; contextlib runs functions that a context is put around.
_OURS = ("solvers", "implicit_attn", "torch", "contextlib")
# What has been told about a layer or function; forgotten with it.
_TOLD: WeakKeyDictionary[nn.Module | CodeType, set[tuple[Any, ...]]] = WeakKeyDictionary()
_TOLD_OF_NONE: set[tuple[Any, ...]] = set()  # at lines of the user, of nothing that has a name
_NAMES: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_ONCE = ("default", "module", "once")  # actions of Python's filters that show a warning but once


def warn_user(message: str, category: type[Warning], cause: str, f: object = None) -> None:
    """Warn at the innermost line outside of these packages and torch, once per layer and cause.

    What is told of a layer names it, by its name in the outermost model that is being called where
    there is one. Of a function and of nothing in particular it is told once per line and cause; a
    function is known by its code, since a closure may be made anew for every call.

    Python's filters keep their meaning: "always" shows every warning, "error" raises it, "ignore" drops
    it. Only the memory of what was shown is ours: Python forgets its own whenever anybody changes the
    filters, as torch does during a training step.
    """
    frame = _user_frame()
    module = str(frame.f_globals.get("__name__", "<unknown>"))
    place = (frame.f_code.co_filename, frame.f_lineno)
    origin = origin_of(f)
    told = _TOLD_OF_NONE if origin is None else _TOLD.setdefault(origin, set())
    key = (category, cause) if isinstance(origin, nn.Module) else (category, cause, *place)
    if isinstance(origin, nn.Module):  # named first: a filter may be for one layer
        message = f"{message}; in {_known_name(origin) if key in told else _named(origin)}"
    if _action(message, category, module, place[1]) in _ONCE:
        if key in told:
            return
        told.add(key)
        if isinstance(origin, nn.Module):
            message += ". Shown once for this layer and cause"
            message += "; its attribute last reports every call" if hasattr(origin, "last") else ""
    warnings.warn_explicit(message, category, *place, module, {})


def _action(message: str, category: type[Warning], module: str, line: int) -> str:
    """What Python's filters would do with a warning."""
    for action, text, kind, place, number in warnings.filters:
        fits = issubclass(category, kind) and number in (0, line)
        # Patterns are compiled; those that Python is started with are plain texts, or None.
        for pattern, own in ((text, message), (place, module)):
            if isinstance(pattern, str):
                fits = fits and pattern == own
            elif pattern is not None:
                fits = fits and pattern.match(own) is not None
        if fits:
            return action
    return getattr(warnings, "defaultaction", "default")


def _named(layer: nn.Module) -> str:
    """The layer in words: its class, and its name in the outermost module that is being called now.

    A backward pass calls no module: there it is the name that the layer was told of by last.
    """
    frame, models = sys._getframe(1), list[nn.Module]()
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if isinstance(caller, nn.Module) and caller not in models:
            models.append(caller)
        frame = frame.f_back
    for model in reversed(models):
        name = next((name for name, part in model.named_modules() if part is layer), "")
        if name:
            _NAMES[layer] = f"the layer {name} ({type(layer).__name__}) of {type(model).__name__}"
            break
    return _known_name(layer)


def _known_name(layer: nn.Module) -> str:
    """The name that the layer was told of by last, without a look at who calls it."""
    return _NAMES.get(layer, f"a layer {type(layer).__name__}")


def origin_of(f: object) -> nn.Module | CodeType | None:
    """What stays the same between calls: the module that ``f`` is, belongs to or names as its layer."""
    while isinstance(f, partial):
        f = f.func
    for home in (f, getattr(f, "layer", None), getattr(f, "__self__", None)):
        if isinstance(home, nn.Module):
            return home
    code = getattr(f, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _user_frame() -> FrameType:
    """The innermost frame of other code; the outermost one where there is none (torch's threads)."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _OURS:
            break
        frame = frame.f_back
    return frame


def reduce_error(error: Exception, record: Any) -> tuple[Any, ...]:
    """``__reduce__`` of an error ``type(error)(message, record)``, ``record`` a dataclass.

    The tensors travel detached and as plain bytes, so that the error outlives its process and fits
    through a pipe. A ``value`` that cannot be pickled is left out.
    """
    try:
        packed = _packed(record)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        packed = _packed(replace(record, value=None))
    return _restore, (type(error), str(error), packed)


def _restore(kind: type[Exception], message: str, packed: bytes) -> Exception:
    return kind(message, pickle.loads(packed))


def _packed(record: Any) -> bytes:
    buffer = io.BytesIO()
    _Detaching(buffer).dump(record)
    return buffer.getvalue()


class _Detaching(pickle.Pickler):
    """Pickles tensors detached and on the CPU."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented

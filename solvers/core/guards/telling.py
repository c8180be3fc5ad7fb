"""Failures told to the user: warnings that point at their line, errors that can be pickled."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_OURS = ("solvers", "implicit_attn", "torch")  # packages whose frames are not the user's
# What has been told about a layer or function, by module of the user; forgotten with the layer.
_TOLD: WeakKeyDictionary[nn.Module | CodeType, dict[str, dict[Any, Any]]] = WeakKeyDictionary()


class _Text(str):
    """A message that is known by its cause.

    Python shows a warning once per line of code and text. The numbers of a message change from call
    to call, so it is hashed and compared by ``cause``.
    """

    cause: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Text) and self.cause == other.cause

    def __hash__(self) -> int:
        return hash(self.cause)


def warn_user(message: str, category: type[Warning], cause: str, f: object = None) -> None:
    """Warn at the innermost line outside of these packages and torch, once per line, cause and ``f``.

    Once, as Python's filters have it: "always" shows every warning, "error" raises it. ``f`` is known
    by its layer or its code, since a closure may be made anew for every call.
    """
    text = _Text(message)
    text.cause = cause
    frame = _user_frame()
    module = frame.f_globals.get("__name__", "<unknown>")
    origin = _origin(f)
    if origin is None:
        registry = frame.f_globals.setdefault("__warningregistry__", {})
    else:
        registry = _TOLD.setdefault(origin, {}).setdefault(module, {})
    warnings.warn_explicit(
        text, category, frame.f_code.co_filename, frame.f_lineno, module, registry
    )


def _origin(f: object) -> nn.Module | CodeType | None:
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
    while frame.f_back is not None and _is_ours(frame):
        frame = frame.f_back
    return frame


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS


def reduce_error(error: Exception, record: Any) -> tuple[Any, ...]:
    """``__reduce__`` of an error ``type(error)(message, record)``, ``record`` a dataclass.

    The tensors travel detached and as plain bytes, so that the error outlives its process and fits
    through a pipe. A ``value`` that cannot be pickled is left out.
    """
    record = _detached(record)
    try:
        packed = _packed(record)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        packed = _packed(replace(record, value=None))
    return _restore, (type(error), str(error), packed)


def _restore(kind: type[Exception], message: str, packed: bytes) -> Exception:
    return kind(message, torch.load(io.BytesIO(packed), weights_only=False))


def _packed(record: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(record, buffer)
    return buffer.getvalue()


def _detached(value: Any) -> Any:
    """The same with all tensors detached and on the CPU."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{entry.name: _detached(getattr(value, entry.name)) for entry in fields(value)}
        )

    def leaf(item: Any) -> Any:
        return item.detach().cpu() if isinstance(item, Tensor) else item

    return pytree.tree_map(leaf, value)

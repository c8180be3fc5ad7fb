"""Failures told to the user: warnings that point at their line, errors that can be pickled."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from dataclasses import fields, is_dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_OURS = ("solvers", "implicit_attn", "torch")  # packages whose frames are not the user's


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


def warn_user(message: str, category: type[Warning], cause: str) -> None:
    """Warn at the innermost line outside of these packages and torch, once per line and ``cause``.

    Once, as Python's filters have it: "always" shows every warning, "error" raises it.
    """
    text = _Text(message)
    text.cause = cause
    frame = _user_frame()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__", "<unknown>")
    warnings.warn_explicit(
        text, category, frame.f_code.co_filename, frame.f_lineno, module, registry
    )


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

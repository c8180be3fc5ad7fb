"""Warnings that point at the user's line, and errors that can be pickled."""

from __future__ import annotations

import pickle
import sys
import warnings
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

# Packages whose frames are not the user's; contextlib runs functions that a context is put around.
_OURS = ("solvers", "implicit_attn", "torch", "contextlib")


def warn_user(message: str, category: type[Warning], f: object = None) -> None:
    """Warn at the innermost line outside of these packages and torch; include the class of a layer ``f``."""
    layer = module_behind(f)
    if layer is not None:
        message += f"; in a layer {type(layer).__name__}"
        message += ", whose attribute last has the numbers" if hasattr(layer, "last") else ""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _OURS:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def module_behind(f: object) -> nn.Module | None:
    """Return the module that ``f`` is, belongs to or names as its layer."""
    while isinstance(f, partial):
        f = f.func
    homes = (f, getattr(f, "layer", None), getattr(f, "__self__", None))
    return next((home for home in homes if isinstance(home, nn.Module)), None)


def reduce_error(error: Exception, record: Any) -> tuple[Any, ...]:
    """``__reduce__`` of an error ``type(error)(message, record)``, ``record`` a dataclass.

    The tensors travel detached and as plain bytes, so that the error outlives its process.
    """
    return _restore, (type(error), str(error), pickle.dumps(_detached(record)))


def _restore(kind: type[Exception], message: str, packed: bytes) -> Exception:
    return kind(message, pickle.loads(packed))


def _detached(record: Any) -> Any:
    """Return a copy of a dataclass or pytree whose tensors are detached and on the CPU."""
    if is_dataclass(record) and not isinstance(record, type):
        changes = {entry.name: _detached(getattr(record, entry.name)) for entry in fields(record)}
        return replace(record, **changes)
    return pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), record)

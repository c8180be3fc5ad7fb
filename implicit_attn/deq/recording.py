"""The hook of :meth:`implicit_attn.DEQ.compile`: solves that are recorded once and then replayed on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import solvers


def recorded_solve(
    f: Callable[..., Any], start: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> solvers.Solution | None:
    """The solution of ``fixed_point(f, start, args, **options)`` by a recording of it.

    The layer asks for it in every solve after ``layer.compile()``. None means that there is no recording for
    these inputs, as is always the case on a CPU, and that the layer solves eagerly.
    """
    return None

"""The public names of the package ``solvers``, each imported when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import solvers

if TYPE_CHECKING:
    from solvers import *  # noqa: F403

__all__ = list(vars(solvers)["__all__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    return getattr(solvers, name)


def __dir__() -> list[str]:
    return dir(solvers)

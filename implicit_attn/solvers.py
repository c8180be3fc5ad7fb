"""The public names and the modules of the package ``solvers``."""

from __future__ import annotations

from typing import Any

import solvers
from solvers import *  # noqa: F403
from solvers.core.exports import define_all

define_all(vars())


def __getattr__(name: str) -> Any:
    return getattr(solvers, name)


def __dir__() -> list[str]:
    return dir(solvers)

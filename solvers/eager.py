"""Functions that torch.compile leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def eager(function: Function) -> Function:
    """Decorator: a compiled caller breaks its graph here and runs ``function`` as it is.

    ``torch.compiler.disable`` with the signature kept for type checkers.
    """
    return cast(Function, torch.compiler.disable(function))

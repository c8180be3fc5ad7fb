"""Functions that ``torch.compile`` leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def eager(function: Function) -> Function:
    """``torch.compiler.disable`` that keeps the function's type.

    The solver loops decide on values, step by step; a compiler can only break its graph there.
    """
    return cast(Function, torch.compiler.disable(function))

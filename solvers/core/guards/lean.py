"""A function that was evaluated before and did nothing special, with few calls around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from solvers.core.guards.outputs import check_output
from solvers.core.guards.purity import OVERWRITES, version_of
from solvers.core.layout import Layout


def lean_value(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    z: Tensor,
    layout: Layout,
    autocast: torch.dtype | None,
) -> Tensor:
    """``f(z, *args)`` at z (B, D), of one tensor: contiguous and of z's dtype, in the shape that f has.

    Raises:
        TypeError, ValueError: for an output that is not like z, or a z that f has overwritten.
    """
    version = version_of(z)
    given = z.reshape(-1, *layout.shapes[0])
    output = f(given, *args)
    if output.shape != given.shape or output.is_cpu != z.is_cpu:
        check_output(output, None, z, layout, autocast)
    if output.requires_grad or output.dtype != z.dtype or output.is_neg():
        output = output.detach().to(z.dtype).resolve_neg()
    if version_of(z) != version:
        raise ValueError(OVERWRITES.format("its input"))
    return output.contiguous()

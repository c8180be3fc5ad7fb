"""Hidden biases and gates: linear functions of a context, one row of numbers a token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.checks import check_mask
from implicit_attn.energies.tokens import hide


class HiddenBias(nn.Module):
    """``U x + c`` of a context ``x`` (..., k): (..., units). Entries of U are drawn from N(0, 1/k).

    U has no bound: what depends on ``x`` alone adds nothing to the curvature in the state.

    Args:
        context_dim: features k of the context.
        units: hidden units.
    """

    def __init__(self, context_dim: int, units: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(units, context_dim) * context_dim**-0.5)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def extra_repr(self) -> str:
        units, context_dim = self.weight.shape
        return f"context_dim={context_dim}, units={units}"


class HiddenGate(nn.Module):
    """``2 sigmoid(G x + g)`` of a context ``x`` (..., k): (..., units), positive, below 2, 1 at first.

    Args:
        context_dim: features k of the context.
        units: hidden units.
    """

    def __init__(self, context_dim: int, units: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(units, context_dim))
        self.bias = nn.Parameter(torch.zeros(units))

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * torch.sigmoid(F.linear(x, self.weight, self.bias))

    def extra_repr(self) -> str:
        units, context_dim = self.weight.shape
        return f"context_dim={context_dim}, units={units}"


def visible_context(x: Any, mask: Tensor | None, weight: Tensor, name: str) -> Tensor:
    """``x`` (B, ..., k) with zeros at masked tokens, for a weight (units, k) of the energy ``name``.

    TypeError, ValueError where it does not fit.
    """
    context_dim = weight.shape[1]
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name}: x must be a tensor (B, ..., {context_dim}), the context, got "
            f"{type(x).__name__}; where x is a dict or a tuple, choose its part with .select(key)"
        )
    if not x.is_floating_point():
        raise TypeError(f"{name}: x must be of a floating dtype, got {x.dtype}")
    if x.dim() < 2 or x.shape[-1] != context_dim:
        raise ValueError(
            f"{name}: x must have {context_dim} features (context_dim), got shape {tuple(x.shape)}"
        )
    if x.device != weight.device:
        raise ValueError(
            f"{name}: x must be on {weight.device} like the parameters, got {x.device}"
        )
    if isinstance(mask, Tensor) and x.shape[:2] != mask.shape:
        raise ValueError(
            f"{name}: x must have the tokens of mask, (B, N) = {tuple(mask.shape)}, got shape "
            f"{tuple(x.shape)}"
        )
    check_mask(mask, x, name, features=1)
    return hide(x, mask)

"""Masks as ``nn.Transformer`` takes them: padding is True, pairs are excluded, minus infinity is added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from solvers.core.modes import in_transform


def counted_tokens(name: str, padding: Any, tokens: Tensor) -> Tensor | None:
    """``nn.Transformer``'s padding mask, (B, N) or (N,), as a mask of the tokens that count.

    A floating one, as ``nn.TransformerEncoder`` makes of every mask, is negative at padding, else zero.
    """
    if padding is None:
        return None
    expected = tuple(tokens.shape[:2])
    if not isinstance(padding, Tensor) or not (
        padding.dtype == torch.bool or padding.is_floating_point()
    ):
        got = padding.dtype if isinstance(padding, Tensor) else type(padding).__name__
        raise TypeError(f"{name} must be bool, True at padding, or floating, got {got}")
    padding = padding.unsqueeze(0) if padding.dim() == 1 else padding
    if tuple(padding.shape) != expected:
        raise ValueError(f"{name} must have the shape {expected}, got {tuple(padding.shape)}")
    if padding.dtype == torch.bool:
        return ~padding
    known = padding.device.type == "cpu" and not in_transform()
    if known and not bool(((padding == 0) | padding.isneginf()).all()):
        raise ValueError(f"{name}, where it is floating, must be -infinity at padding and else 0")
    return padding == 0


def allowed_pairs(
    mask: Any, shape: tuple[int, int, int, int]
) -> tuple[Tensor | None, Tensor | None]:
    """``nn.Transformer``'s mask of pairs as pairs that are allowed and a bias of their scores."""
    batch, heads, tokens, keys = shape
    fits = isinstance(mask, Tensor) and tuple(mask.shape[-2:]) == (tokens, keys)
    if fits and mask.dim() == 3 and mask.shape[0] == batch * heads:
        mask = mask.unflatten(0, (batch, heads))
    elif not fits or mask.dim() != 2:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"src_mask must have the shape ({tokens}, {keys}) or ({batch * heads}, {tokens}, {keys}), "
            f"got {got}"
        )
    if mask.dtype == torch.bool:
        return ~mask, None
    if not mask.is_floating_point():
        raise TypeError(f"src_mask must be bool or floating, got {mask.dtype}")
    allowed = ~mask.isneginf()
    known = mask.device.type == "cpu" and not in_transform()
    if known and not bool((mask.isfinite() | ~allowed).all()):
        raise ValueError("src_mask must be finite or -infinity, got NaN or infinity")
    return allowed, mask.masked_fill(~allowed, 0.0)

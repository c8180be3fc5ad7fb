"""Images as patches and back, and hidden patches, whose pixels are NaN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solvers.core.checks import require_count


def split_patches(images: Tensor, patch: int) -> Tensor:
    """Images (B, C, S, S) -> the pixels of their patches (B, N, C patch^2), row by row.

    Raises:
        ValueError: the images are not square, or ``patch`` does not divide their side.
    """
    batch, channels, size, width = _check(images).shape
    if size != width or size % require_count("patch", patch):
        raise ValueError(
            f"patch must divide the side of square images, got {patch} for {size} x {width}"
        )
    side = size // patch
    parts = images.reshape(batch, channels, side, patch, side, patch)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(batch, side * side, -1)


def join_patches(pixels: Tensor, patch: int) -> Tensor:
    """The inverse of :func:`split_patches`: (B, N, C patch^2) -> (B, C, S, S), S = sqrt(N) patch.

    Raises:
        ValueError: N is no square, or the pixels are not those of patches of this side.
    """
    if pixels.dim() != 3:
        raise ValueError(f"pixels must have the shape (B, N, P), got {tuple(pixels.shape)}")
    batch, number, values = pixels.shape
    side, area = math.isqrt(number), require_count("patch", patch) ** 2
    if side * side != number or values % area:
        raise ValueError(
            f"pixels must be (B, N, C * {area}) with a square N, got {tuple(pixels.shape)}"
        )
    parts = pixels.reshape(batch, side, side, values // area, patch, patch)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, side * patch, side * patch)


def hidden_patches(images: Tensor, patch: int) -> Tensor:
    """(B, N) bool, True where a patch of the images (B, C, S, S) holds a NaN."""
    return split_patches(images, patch).isnan().any(-1)


def hide_patches(images: Tensor, hidden: Tensor, patch: int) -> Tensor:
    """The images (B, C, S, S) with NaN in all pixels of the patches ``hidden`` (B, N) bool.

    Raises:
        TypeError: ``hidden`` is not bool.
        ValueError: its shape is another one.
    """
    pixels = split_patches(images, patch)
    if hidden.dtype != torch.bool:
        raise TypeError(f"hidden must be bool, got {hidden.dtype}")
    if hidden.shape != pixels.shape[:2]:
        raise ValueError(
            f"hidden must have the shape {tuple(pixels.shape[:2])}, got {tuple(hidden.shape)}"
        )
    return join_patches(pixels.masked_fill(hidden.unsqueeze(-1), math.nan), patch)


def _check(images: Tensor) -> Tensor:
    if images.dim() != 4 or not images.is_floating_point():
        raise ValueError(
            f"images must be floating (B, C, S, S), got {images.dtype} {tuple(images.shape)}"
        )
    return images

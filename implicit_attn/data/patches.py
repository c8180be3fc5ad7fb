"""Images as patches and back, and hidden patches, whose pixels are NaN."""

from __future__ import annotations

import math

from torch import Tensor

from solvers.core.checks import require_count


def split_patches(images: Tensor, patch: int) -> Tensor:
    """Images (B, C, S, S) -> the pixels of their patches (B, N, C patch^2), row by row.

    Raises:
        ValueError: the images are not square, or ``patch`` does not divide their side.
    """
    batch, channels, size, width = images.shape
    if size != width or size % require_count("patch", patch):
        raise ValueError(
            f"patch must divide the side of square images, got {patch} for {size} x {width}"
        )
    side = size // patch
    parts = images.reshape(batch, channels, side, patch, side, patch)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(batch, side * side, -1)


def join_patches(pixels: Tensor, patch: int) -> Tensor:
    """The inverse of :func:`split_patches`: (B, N, C patch^2) -> (B, C, S, S), S = sqrt(N) patch."""
    batch, number, _ = pixels.shape
    side = math.isqrt(number)
    parts = pixels.reshape(batch, side, side, -1, patch, patch)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, side * patch, side * patch)


def hidden_patches(images: Tensor, patch: int) -> Tensor:
    """(B, N) bool, True where a patch of the images (B, C, S, S) holds a NaN."""
    return split_patches(images, patch).isnan().any(-1)


def hide_patches(images: Tensor, hidden: Tensor, patch: int) -> Tensor:
    """The images (B, C, S, S) with NaN in all pixels of the patches ``hidden`` (B, N) bool."""
    pixels = split_patches(images, patch)
    return join_patches(pixels.masked_fill(hidden.unsqueeze(-1), math.nan), patch)

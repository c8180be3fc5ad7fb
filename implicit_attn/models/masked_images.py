"""A model of images with hidden patches, around any backbone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from implicit_attn.data.images import hidden_patches, join_patches
from implicit_attn.models.images import (
    PatchEmbedding,
    check_images,
    count_patches,
    sinusoidal_positions,
    token_width,
)
from solvers.core.checks import require_choice, require_count

POSITIONS = ("sinusoidal", "learned")


def grid_positions(side: int, dim: int) -> Tensor:
    """Positions of ``side`` x ``side`` tokens, row by row, (side^2, dim): sines and cosines of the row
    in the first half of the channels, of the column in the second; dim is a multiple of 4."""
    if dim % 4:
        raise ValueError(f"dim must be a multiple of 4 for sinusoidal positions, got {dim}")
    line = sinusoidal_positions(side, dim // 2)
    rows, columns = line.repeat_interleave(side, dim=0), line.repeat(side, 1)
    return torch.cat([rows, columns], dim=1)


class MaskedImageModel(nn.Module):
    r"""Predicts the pixels of hidden patches from the visible ones ::

        x_i = W p_i + w + position_i   of a visible patch with pixels p_i
        x_i = mask token + position_i  of a hidden one
        predicted pixels of patch i = V LN(backbone(x)_i) + v

    No norm stands before the backbone, where it would take the brightness from a patch. Hidden patches
    are told by their pixels, which are NaN. A patch with a single NaN is hidden as a whole. Nothing of
    a hidden patch but its place reaches the backbone.

    Args:
        backbone: module with ``dim`` and ``forward(tokens (B, N, d), *, iterations=None)``; of
            Hyper-SET the paper conditions the step sizes on the input here
            (``step_size="conditioned-input"``).
        image_size: height = width S of an image, a multiple of ``patch``.
        channels: C.
        patch: height = width of a patch in pixels.
        positions: "learned" (added; N(0, 0.5^2) at the start) or "sinusoidal" (constant, of row and
            column).

    Shapes: images (B, C, S, S) -> images (B, C, S, S), every patch predicted; :meth:`fill` keeps the
    visible pixels.

    Example:
        >>> from implicit_attn.models import HyperSET
        >>> model = MaskedImageModel(HyperSET(64, 4, 64), 8, 1, patch=2)
        >>> images = torch.rand(3, 1, 8, 8)
        >>> images[:, :, :2, :2] = float("nan")  # the first patch is hidden
        >>> model.fill(images).isnan().any().item()
        False

    Source: the masked image modelling of Hu, Zou, Xu, "Hyper-SET"
    (https://arxiv.org/abs/2502.11646), with the pixels of patches in place of the codes of a
    pretrained quantiser; Xie et al., "SimMIM" (https://arxiv.org/abs/2111.09886), for pixels
    predicted by a linear readout.
    """

    def __init__(
        self,
        backbone: nn.Module,
        image_size: int,
        channels: int,
        *,
        patch: int = 4,
        positions: str = "learned",
    ) -> None:
        super().__init__()
        dim, patches = token_width(backbone), count_patches(image_size, patch)
        self.patch, self.positions = patch, require_choice("positions", positions, POSITIONS)
        self.image_shape = (require_count("channels", channels), image_size, image_size)
        self.embed = PatchEmbedding(channels, patch, dim)
        self.mask_token = nn.Parameter(0.02 * torch.randn(dim))
        if positions == "learned":
            self.position = nn.Parameter(0.5 * torch.randn(patches, dim))
        else:
            places = grid_positions(image_size // patch, dim)
            self.register_buffer("position", places, persistent=False)
        self.backbone = backbone
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, channels * patch**2)

    def tokens(self, images: Tensor) -> Tensor:
        """Images with NaN in hidden patches -> the backbone's input, (B, N, d)."""
        hidden = hidden_patches(check_images(images, self.image_shape), self.patch).unsqueeze(-1)
        # NaN times zero is NaN: hidden pixels are replaced before any product, infinite ones are not.
        x = self.embed(images.masked_fill(images.isnan(), 0.0))
        return torch.where(hidden, self.mask_token.to(x.dtype), x) + self.position

    def pixels(self, z: Tensor) -> Tensor:
        """States (B, N, d) -> predicted images (B, C, S, S)."""
        return join_patches(self.head(self.norm(z)), self.patch)

    def forward(self, images: Tensor, iterations: int | None = None) -> Tensor:
        return self.pixels(self.backbone(self.tokens(images), iterations=iterations))

    def fill(self, images: Tensor, iterations: int | None = None) -> Tensor:
        """The images, with the predicted pixels in place of those that are NaN."""
        return torch.where(images.isnan(), self(images, iterations).to(images.dtype), images)

    def extra_repr(self) -> str:
        return f"image_shape={self.image_shape}, patch={self.patch}, positions={self.positions}"
